"""Find slots, queue delay and preferred batch sizes for a load: the highest throughput whose p95 latency meets the SLO.

Each point of a grid is a server of its own under the load generator. The load is a closed loop of uniform lengths. What
the budget leaves no time for is not measured, so the grid's order is by importance: slots first.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import text_format  # type: ignore[import-untyped]  # ships no annotations
from triton_supervisor.triton import MODEL
from tritonclient.grpc.model_config_pb2 import ModelConfig

from perf.bench.measure import Bench
from perf.checkpoint import default_checkpoint, described
from perf.command import CORES, Budget, count, existing_checkpoint, make_command, positive
from perf.device_rates import measure_rates
from perf.environment import ROOT
from perf.load.workload import PROMPT_TOKENS, passages
from perf.results_file import RESULTS, Results
from perf.servers.triton import our_server

SLOTS = (32, 16, 64, 8)
DELAYS_US = (10_000, 0)
PREFERRED: tuple[tuple[int, ...], ...] = ((4, 8, 16, 32), ())
REPOSITORY = ROOT / "model_repository"


class Point(NamedTuple):
    """A config's tuned settings. preferred: batch sizes; empty is Triton's default, the full batch."""

    slots: int
    delay_us: int
    preferred: tuple[int, ...]

    @property
    def key(self) -> str:
        """Of its server: slots/delay/sizes, such as 32/10000/4-8-16-32."""
        return f"{self.slots}/{self.delay_us}/{'-'.join(map(str, self.preferred))}"


def grid() -> list[Point]:
    """Return all points, with preferred sizes up to the slots, the most important first."""
    points = (
        Point(slots, delay, tuple(size for size in preferred if size <= slots) or (slots,))
        for delay, preferred, slots in product(DELAYS_US, PREFERRED, SLOTS)
    )
    return list(dict.fromkeys(points))


def configured(config: str, point: Point) -> str:
    """Return a config.pbtxt with the point's settings in place of its own, all else unchanged."""
    message = text_format.Parse(config, ModelConfig())
    message.max_batch_size = point.slots
    message.dynamic_batching.max_queue_delay_microseconds = point.delay_us
    message.dynamic_batching.preferred_batch_size[:] = point.preferred
    return str(text_format.MessageToString(message))


def best(measurements: Mapping[str, Mapping[str, Any]], slo_p95_ms: float) -> str | None:
    """Return the key with the highest throughput of those without errors that meet the SLO; None if none does."""
    met = [
        (measurement["tokens_per_second"], key)
        for key, measurement in measurements.items()
        if measurement.get("errors") == 0 and measurement["latency_ms"]["p95"] <= slo_p95_ms
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


def main() -> None:
    """Measure the grid within the budget, write the result and print the best config."""
    parser = argparse.ArgumentParser(prog="make tune", description=__doc__)
    add = parser.add_argument
    add("--slo-p95-ms", type=positive, required=True, help="the 95th percentile of latency to meet, in milliseconds")
    add("--budget", type=positive, default=30.0, metavar="MINUTES", help="default 30")
    add("--model", type=existing_checkpoint, help="a Llama in safetensors (default: SmolLM2-135M-Instruct)")
    add("--users", type=count, default=32, help="default 32")
    add("--requests", type=count, default=64, help="measured, after one per user (default 64)")
    add("--output-tokens", type=count, default=100, help="mean of the uniform lengths (default 100)")
    options = parser.parse_args()
    checkpoint = options.model or default_checkpoint()
    settings = {name: value for name, value in vars(options).items() if isinstance(value, int | float)}
    results = Results(RESULTS / "tune.json", "tune", {"model": described(checkpoint), **settings}, make_command("tune"))
    bench = Bench(results, Budget(options.budget), measure_rates(CORES))
    load = passages("tune", "uniform", options.users, options.requests, options.output_tokens)
    environment = {"LLAMA_MAX_MODEL_LEN": str(PROMPT_TOKENS + 2 * options.output_tokens)}
    points = {f"{load.key}/{point.key}": point for point in grid()}
    for point in points.values():
        server = our_server(point.key, point.key, "default", "int8", environment, repository=partial(repository, point))
        bench.measure(server, checkpoint, [load])
    key = best(results.measurements, options.slo_p95_ms)
    results.section("best", key)
    results.finish()
    print("written to perf/results/tune.json")
    if key is None:
        sys.exit(f"tune: no point has a p95 of at most {options.slo_p95_ms:g} ms; fewer users, or a higher SLO")
    print(f"\nthe best within {options.slo_p95_ms:g} ms, for config.pbtxt:\n")
    print(f"max_batch_size: {points[key].slots}")
    print(f"preferred_batch_size: {list(points[key].preferred)}")
    print(f"max_queue_delay_microseconds: {points[key].delay_us}")


if __name__ == "__main__":
    main()
