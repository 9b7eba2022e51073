"""Some of our configurations at 1 to 128 concurrent requests, in a file of its own: `make sweep`.

A separate run, because it takes as long as everything else together. Skipped measurements are recorded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from perf.analyzer.binary import fetched
from perf.bench.measure import Measurement, article_entry
from perf.checkpoint import default_checkpoint, described, unquantized
from perf.command import CORES, begin, run_command, run_parser
from perf.course import Course
from perf.roofline.rates import DeviceRates
from perf.servers.triton import Configuration, Served, configurations, serving
from perf.workload import Mix

MIX: Mix = "uniform"
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128)
LEAST = 8
"""Minimum of requests at low concurrency: half a minute of a slow server, one at a time."""

_LEAST_S, _MOST_S, _EACH_S = 60.0, 240.0, 4.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; a value out of bounds ends the program with one line."""
    default, known = ["inflight_int8", "batched_int8", f"naive_{unquantized()}"], [one.key for one in configurations()]
    parser = run_parser("make sweep", __doc__, 40, "perf/results/sweep.json")
    words = f"of {', '.join(known)}; default {', '.join(default)}"
    parser.add_argument("servers", nargs="*", metavar="SERVER", help=words)
    found = parser.parse_args(arguments)
    if unknown := sorted({*found.servers} - {*known}):
        parser.error(f"there is no server {unknown[0]!r}: known are {', '.join(known)}")
    found.command = run_command("sweep", found, found.servers)
    found.servers = found.servers or default
    return found


def sweep(course: Course, one: Configuration, checkpoint: Path, rates: DeviceRates) -> None:
    """Measure a configuration at every concurrency that is missing in the results, on one server."""

    def measure(concurrency: int, served: Served) -> Measurement:
        # A wave takes longer at a higher concurrency; the bound is for slow servers.
        seconds = min(max(_LEAST_S, _EACH_S * concurrency), _MOST_S)
        course.refuse_without(seconds)
        return article_entry(course, one, served, checkpoint, MIX, concurrency, rates, seconds, LEAST, seconds)

    def start() -> AbstractContextManager[Served]:
        fetched()  # without perf_analyzer no server is started
        return serving(one, checkpoint, CORES)

    loads = {f"sweep/{one.key}/{concurrency}": partial(measure, concurrency) for concurrency in CONCURRENCIES}
    course.measure_on_one(one.to_json(), loads, start)


def main() -> None:
    """Measure what the command line selects and write the results."""
    options = parse()
    checkpoint = options.model or default_checkpoint()
    settings = {"model": described(checkpoint), "threads": CORES}
    course, rates = begin("sweep", options, settings, options.command)
    known = {one.key: one for one in configurations()}
    for key in options.servers:
        sweep(course, known[key], checkpoint, rates)
    course.results.finish()
    print(f"\nwritten to {options.output}; make report puts it into docs/benchmarks.md")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("sweep: interrupted; SWEEP=--resume goes on with what was measured")
