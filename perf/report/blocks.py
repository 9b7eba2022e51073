"""What there is to report, by name: the tables and plots, and the kind of result that each is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from perf.report.run import Run
from perf.report.table import Table
from perf.report.tables import article, gpu, overhead, peers, quality, tune


@dataclass(frozen=True)
class TableBlock:
    """make: None if the run has nothing of it. command: what measures it."""

    kind: str
    command: str
    make: Callable[[Run], Table | None]


@dataclass(frozen=True)
class PlotBlock:
    """title: the picture's text for those who don't see it. module: its function is its last name."""

    kind: str
    command: str
    title: str
    module: str

    def draw(self, run: Run) -> str | None:
        """Return the SVG; None if the run has nothing of it."""
        # Only now: matplotlib takes a second to import, which tables needn't wait for.
        module, name = self.module.rsplit(".", 1)
        drawn = getattr(import_module(module), name)(run)
        assert drawn is None or isinstance(drawn, str)
        return drawn


_BENCH = ("bench", "make bench")
_SWEEP = ("sweep", "make sweep")
_QUALITY = ("quality", "make quality")
_GPU = ("gpu", "make bench-gpu")
_TUNE = ("tune", "make tune SLO_P95_MS=<milliseconds>")

TABLES: Mapping[str, TableBlock] = {
    "article": TableBlock(*_BENCH, article.article),
    "mixed": TableBlock(*_BENCH, article.mixed),
    "sweep": TableBlock(*_SWEEP, article.sweep),
    "peers-closed": TableBlock(*_BENCH, peers.closed),
    "peers-poisson": TableBlock(*_BENCH, peers.poisson),
    "overhead": TableBlock(*_BENCH, overhead.overhead),
    "where": TableBlock(*_BENCH, overhead.where),
    "quality": TableBlock(*_QUALITY, quality.quality),
    "gpu-verdict": TableBlock(*_GPU, gpu.verdict),
    "gpu-decoding": TableBlock(*_GPU, gpu.decoding),
    "gpu-article": TableBlock(*_GPU, article.article),
    "gpu-mixed": TableBlock(*_GPU, article.mixed),
    "gpu-products": TableBlock(*_GPU, gpu.products),
    "tune": TableBlock(*_TUNE, tune.tune),
}

PLOTS: Mapping[str, PlotBlock] = {
    "latency-throughput": PlotBlock(
        *_SWEEP,
        "Latency at the median and the 95th percentile over tokens per second",
        "perf.report.plots.latency.latency",
    ),
    "scaling": PlotBlock(
        *_SWEEP,
        "Tokens per second over the requests at a time, with the device's limit",
        "perf.report.plots.scaling.scaling",
    ),
    "lengths": PlotBlock(
        *_BENCH, "Tokens per second at equal, uniform and geometric output lengths", "perf.report.plots.lengths.lengths"
    ),
    "peers": PlotBlock(
        *_BENCH, "Tokens per second of this server and its peers, closed loop", "perf.report.plots.lengths.peers"
    ),
    "streaming": PlotBlock(
        *_BENCH,
        "Time to first token, inter-token latency and goodput under Poisson arrivals",
        "perf.report.plots.streaming.streaming",
    ),
    "overhead": PlotBlock(*_BENCH, "Where the time of serving goes", "perf.report.plots.icicle.icicle"),
    "pareto": PlotBlock(
        *_TUNE, "Tokens per second over p95 latency of the tuned settings", "perf.report.plots.pareto.pareto"
    ),
}
