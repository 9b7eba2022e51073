"""Some of our configurations at 1 to 128 concurrent requests, in a file of its own: `make sweep`.

A separate run, because it takes as long as everything else together. Skipped measurements are recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from perf import workload
from perf.analyzer.binary import find
from perf.article import measure, sizes
from perf.article.configurations import Configuration, configurations, serving
from perf.bench.articles import START_S
from perf.checkpoint import check_context, default_checkpoint, described, unquantized
from perf.command import CORES, make_command, run_parser
from perf.course import Budget, Course, NoTimeError, reason
from perf.results_file import Results
from perf.roofline.device import measured_once
from perf.roofline.rates import DeviceRates

OUTPUT = Path("perf/results/sweep.json")
MIX: workload.Mix = "uniform"
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128)
LEAST = 8
"""Minimum of requests at low concurrency: half a minute of a slow server, one at a time."""

_LEAST_S, _MOST_S, _EACH_S = 60.0, 240.0, 4.0
# The warm-up and a measured one.
_FEWEST_WAVES = 2
_KNOWN = {configuration.key: configuration for configuration in configurations()}


@dataclass(frozen=True)
class Options:
    """servers: keys of configurations. model: None for random weights. command: repeats the run."""

    servers: tuple[str, ...]
    budget_s: float
    model: Path | None
    threads: int
    resume: bool
    output: Path
    command: str


def seconds(concurrency: int) -> float:
    """Return the time for one concurrency: a wave takes longer at a higher one, up to a bound for slow servers."""
    return min(max(_LEAST_S, _EACH_S * concurrency), _MOST_S)


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Parse the command line; a value out of bounds ends the program with one line."""
    default = ("inflight_int8", "batched_int8", f"naive_{unquantized()}")
    parser = run_parser("make sweep", __doc__, 40, OUTPUT)
    parser.add_argument("servers", nargs="*", metavar="SERVER", help=f"of {', '.join(_KNOWN)}; default {default}")
    found = parser.parse_args(arguments)
    if unknown := sorted({*found.servers} - {*_KNOWN}):
        parser.error(f"there is no server {unknown[0]!r}: known are {', '.join(_KNOWN)}")
    given = [*found.servers, *(["--threads", str(found.threads)] if found.threads != CORES else [])]
    variables = {} if found.model is None else {"MODEL": found.model.name}
    return Options(
        servers=tuple(found.servers) or default,
        budget_s=60 * found.budget,
        model=found.model,
        threads=found.threads,
        resume=found.resume,
        output=found.output,
        command=make_command("sweep", variables, given),
    )


def run(options: Options) -> None:
    """Measure what the options select and write the results."""
    checkpoint = options.model or default_checkpoint()
    check_context(checkpoint)
    torch.set_num_threads(options.threads)
    settings = {"model": described(checkpoint), "threads": options.threads}
    try:
        results = Results(options.output, "sweep", settings, options.resume)
    except ValueError as error:
        sys.exit(f"sweep: {error}")
    results.section("command", options.command)
    course = Course(results, Budget(options.budget_s))
    rates = measured_once(results, options.threads)
    for key in options.servers:
        _sweep(course, _KNOWN[key], checkpoint, options.threads, rates)
    results.finish()
    print(f"\nwritten to {options.output}; make report puts it into docs/benchmarks.md")


def _sweep(course: Course, one: Configuration, checkpoint: Path, threads: int, rates: DeviceRates) -> None:
    """Measure a configuration at every concurrency that is missing in the results, on one server."""
    left = {number: f"sweep/{one.key}/{number}" for number in CONCURRENCIES}
    left = {number: key for number, key in left.items() if not course.has(key)}
    if not left:
        return
    course.budget.say(f"{one.title} at {', '.join(map(str, left))} …")
    slowest = 0.0
    try:
        course.refuse_without(START_S)
        analyzer = find()
        with serving(one, checkpoint, threads) as served:
            for number, key in left.items():
                available = seconds(number)
                try:
                    # Where the minimum can't fit, not even the pace is measured: a wave never gets shorter.
                    _check_fits(slowest, available)
                    pace = measure.pace(served, MIX, number, analyzer)
                    slowest = max(slowest, pace.wave_seconds(workload.MEAN_OUTPUT))
                    size = sizes.choose(available, pace, workload.MEAN_OUTPUT, LEAST)
                    if not size.fits:
                        raise NoTimeError(size.describe())
                    course.note(key, measure.sized(served, MIX, number, size, rates, analyzer))
                except NoTimeError as error:
                    course.note(key, {**one.to_json(), "not_run": reason(error)})
                course.refuse_without(available)
    except Exception as error:  # noqa: BLE001 - any library may raise; the reason is recorded and printed
        for key in left.values():
            if not course.has(key):
                course.note(key, {**one.to_json(), "not_run": reason(error)})


def _check_fits(wave_s: float, available: float) -> None:
    least = _FEWEST_WAVES * wave_s
    if least > available:
        raise NoTimeError(f"{_FEWEST_WAVES} waves take at least {least:.0f} and not the {available:.0f} s")


if __name__ == "__main__":
    try:
        run(parse())
    except KeyboardInterrupt:
        sys.exit("sweep: interrupted; SWEEP=--resume goes on with what was measured")
