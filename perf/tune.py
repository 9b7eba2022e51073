"""Find slots, queue delay and preferred batch sizes for a load: the highest throughput whose p95 latency meets the SLO.

Each point of a grid is a server of its own under the load generator. The load is a closed loop of uniform lengths. What
the budget leaves no time for is not measured, so the grid's order is by importance: slots first.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import NamedTuple

from google.protobuf import text_format  # type: ignore[import-untyped]  # ships no annotations
from triton_local.server import LocalTriton
from triton_supervisor.triton import MODEL
from tritonclient.grpc.model_config_pb2 import ModelConfig

from perf.checkpoint import default_checkpoint, described
from perf.command import CORES, Budget, count, existing_checkpoint, make_command, positive
from perf.environment import ROOT
from perf.load.generator import drive
from perf.load.protocols import Target
from perf.load.summary import percentiles, summarize
from perf.results_file import Results
from perf.servers.triton import READY_TIMEOUT_S, UNDISTURBED
from perf.workload import warm_and_measured

SLOTS = (32, 16, 64, 8)
DELAYS_US = (10_000, 0)
PREFERRED: tuple[tuple[int, ...], ...] = ((4, 8, 16, 32), ())
REPOSITORY = ROOT / "model_repository"
_LOAD_S = 900.0


class Point(NamedTuple):
    """A config's tuned settings. preferred: batch sizes; empty is Triton's default, the full batch."""

    slots: int
    delay_us: int
    preferred: tuple[int, ...]


class Figures(NamedTuple):
    """The measurement of a point: tokens/s in steady state, p95 latency in ms, failed requests."""

    tokens_per_second: float
    p95_ms: float
    errors: int


def grid() -> list[Point]:
    """Return all points, with preferred sizes up to the slots, the most important first."""
    points = (
        Point(slots, delay, tuple(size for size in preferred if size <= slots))
        for delay, preferred, slots in product(DELAYS_US, PREFERRED, SLOTS)
    )
    return list(dict.fromkeys(points))


def configured(config: str, point: Point) -> str:
    """Return a config.pbtxt with the point's settings in place of its own, all else unchanged."""
    message = text_format.Parse(config, ModelConfig())
    message.max_batch_size = point.slots
    message.dynamic_batching.max_queue_delay_microseconds = point.delay_us
    message.dynamic_batching.preferred_batch_size[:] = point.preferred or (point.slots,)
    return str(text_format.MessageToString(message))


def best(measured: Sequence[tuple[Point, Figures]], slo_p95_ms: float) -> Point | None:
    """Return the point with the highest throughput of those without errors that meet the SLO; None if none does."""
    met = [
        (figures.tokens_per_second, point)
        for point, figures in measured
        if figures.errors == 0 and figures.p95_ms <= slo_p95_ms
    ]
    return max(met, default=(0.0, None))[1]


@contextmanager
def repository(point: Point) -> Iterator[Path]:
    """Yield a copy of the model repository whose default config has the point's settings."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "model_repository"
        shutil.copytree(REPOSITORY, copy, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        config = copy / MODEL / "config.pbtxt"
        config.write_text(configured(config.read_text(), point))
        yield copy


def measure(point: Point, options: argparse.Namespace, checkpoint: Path) -> Figures:
    """Put the load on a server of the point."""
    requests = warm_and_measured(checkpoint, "uniform", options.users, options.requests, options.output_tokens)
    with (
        repository(point) as folder,
        LocalTriton(
            variant="default",
            model=str(checkpoint),
            model_repository=folder,
            environment={"OMP_NUM_THREADS": str(CORES), "LLAMA_PREFIX_CACHE": "off", **UNDISTURBED},
            ready_timeout=READY_TIMEOUT_S,
        ) as triton,
    ):
        target = Target("tuned", "triton_generate", f"http://{triton.http_url}", MODEL)
        run = drive(target, requests, options.users, options.users, _LOAD_S)
    summary = summarize(run)
    rate, errors = summary.get("tokens_per_second"), summary["errors"]
    latencies = [record.latency for record in run.measured if not record.error]
    p95 = percentiles(latencies)["p95"] if latencies else float("inf")
    assert isinstance(errors, int)
    return Figures(rate if isinstance(rate, float) else 0.0, p95, errors)


def main() -> None:
    """Measure the grid within the budget, write the result and print the best config."""
    parser = argparse.ArgumentParser(prog="make tune", description=__doc__)
    add = parser.add_argument
    add("--slo-p95-ms", type=positive, required=True, help="the 95th percentile of latency to meet, in milliseconds")
    add("--budget", type=positive, default=30.0, metavar="MINUTES", help="default 30")
    add("--model", type=existing_checkpoint, help="a Llama in safetensors (default: random weights)")
    add("--users", type=count, default=32, help="default 32")
    add("--requests", type=count, default=64, help="measured, after one per user (default 64)")
    add("--output-tokens", type=count, default=100, help="mean of the uniform lengths (default 100)")
    add("--output", type=Path, default=Path("perf/results/tune.json"), metavar="FILE")
    options = parser.parse_args()
    checkpoint = options.model or default_checkpoint()
    settings = {name: value for name, value in vars(options).items() if isinstance(value, int | float)}
    results = Results(options.output, "tune", {"model": described(checkpoint), **settings}, make_command("tune"))
    budget, measured, longest = Budget(options.budget), list[tuple[Point, Figures]](), 0.0
    for point in grid():
        if measured and longest > budget.left:
            budget.say(f"{point}: not measured: a point takes {longest:.0f} s, {budget.left:.0f} s are left")
            continue
        began = time.monotonic()
        figures = measure(point, options, checkpoint)
        longest = max(longest, time.monotonic() - began)
        measured.append((point, figures))
        results.add(f"point/{len(measured)}", {**point._asdict(), **figures._asdict()})
        budget.say(f"{point}: {figures}")
    choice = best(measured, options.slo_p95_ms)
    results.section("best", None if choice is None else choice._asdict())
    results.finish()
    print(f"written to {options.output}")
    if choice is None:
        sys.exit(f"tune: no point has a p95 of at most {options.slo_p95_ms:g} ms; fewer users, or a higher SLO")
    print(f"\nthe best within {options.slo_p95_ms:g} ms, for config.pbtxt:\n")
    print(f"max_batch_size: {choice.slots}")
    print(f"preferred_batch_size: {list(choice.preferred or (choice.slots,))}")
    print(f"max_queue_delay_microseconds: {choice.delay_us}")


if __name__ == "__main__":
    main()
