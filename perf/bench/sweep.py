"""Some of our configurations at 1 to 128 concurrent requests, in a file of its own: `make sweep`.

A separate run, because it takes as long as everything else together. Skipped measurements are recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from perf.analyzer.binary import find
from perf.bench.measure import Measurement, article_entry, choose, measured_pace
from perf.checkpoint import default_checkpoint, unquantized
from perf.command import Options, begin, given, run_parser
from perf.course import Course, NoTimeError
from perf.roofline.rates import DeviceRates
from perf.servers.triton import Configuration, Served, configurations, serving
from perf.workload import Mix

MIX: Mix = "uniform"
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128)
LEAST = 8
"""Minimum of requests at low concurrency: half a minute of a slow server, one at a time."""

_LEAST_S, _MOST_S, _EACH_S = 60.0, 240.0, 4.0
# The warm-up and a measured one.
_FEWEST_WAVES = 2


class SweepOptions(Options):
    """servers: keys of configurations. given: the options that change what is measured, as typed."""

    servers: list[str]
    given: list[str]


def seconds(concurrency: int) -> float:
    """Return the time for one concurrency: a wave takes longer at a higher one, up to a bound for slow servers."""
    return min(max(_LEAST_S, _EACH_S * concurrency), _MOST_S)


def parse(arguments: Sequence[str] | None = None) -> SweepOptions:
    """Parse the command line; a value out of bounds ends the program with one line."""
    default, known = ["inflight_int8", "batched_int8", f"naive_{unquantized()}"], [one.key for one in configurations()]
    parser = run_parser("make sweep", __doc__, 40, "perf/results/sweep.json")
    words = f"of {', '.join(known)}; default {', '.join(default)}"
    parser.add_argument("servers", nargs="*", metavar="SERVER", help=words)
    found = parser.parse_args(arguments, SweepOptions())
    if unknown := sorted({*found.servers} - {*known}):
        parser.error(f"there is no server {unknown[0]!r}: known are {', '.join(known)}")
    found.given = [*found.servers, *given(parser, found, ["threads"])]
    found.servers = found.servers or default
    return found


def sweep(course: Course, one: Configuration, checkpoint: Path, threads: int, rates: DeviceRates) -> None:
    """Measure a configuration at every concurrency that is missing in the results, on one server."""
    slowest = 0.0

    def measure(concurrency: int, served: Served) -> Measurement:
        nonlocal slowest
        available = seconds(concurrency)
        course.refuse_without(available)
        # Where the minimum can't fit, not even the pace is measured: a wave never gets shorter.
        if (least := _FEWEST_WAVES * slowest) > available:
            raise NoTimeError(f"{_FEWEST_WAVES} waves take at least {least:.0f} and not the {available:.0f} s")
        pace = measured_pace(served, checkpoint, MIX, concurrency)
        slowest = max(slowest, pace.wave_seconds())
        size = choose(available, pace, LEAST)
        if not size.fits:
            least = size.predicted_s
            raise NoTimeError(
                f"{size.requests} requests after {size.warmup} take {least:.0f} and not the {available:.0f} s"
            )
        return article_entry(one, served, checkpoint, MIX, concurrency, size, rates)

    loads = {f"sweep/{one.key}/{concurrency}": partial(measure, concurrency) for concurrency in CONCURRENCIES}

    def start() -> AbstractContextManager[Served]:
        find()  # without perf_analyzer no server is started
        return serving(one, checkpoint, threads)

    course.measure_on_one(one.to_json(), loads, start)


def main() -> None:
    """Measure what the command line selects and write the results."""
    options = parse()
    checkpoint = options.model or default_checkpoint()
    course, rates = begin("sweep", options, checkpoint, {}, options.given)
    known = {one.key: one for one in configurations()}
    for key in options.servers:
        sweep(course, known[key], checkpoint, options.threads, rates)
    course.results.finish()
    print(f"\nwritten to {options.output}; make report puts it into docs/benchmarks.md")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("sweep: interrupted; SWEEP=--resume goes on with what was measured")
