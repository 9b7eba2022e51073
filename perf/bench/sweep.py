"""Some of our configurations at 1 to 128 requests at a time, in a file of its own: `make sweep`.

A run of its own, because it takes as long as everything else together and hangs on nothing of it. What there was no
time for says so in the results.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from perf import workload
from perf.article.subjects import Subject, subjects
from perf.article.sweep import CONCURRENCIES, sweep
from perf.checkpoint import check_context, default_checkpoint, described, unquantized
from perf.command import checkpoint_folder, count, make_command, positive
from perf.course import Budget, Course, reason
from perf.results import Results
from perf.roofline.device import measured_once
from perf.roofline.rates import DeviceRates

OUTPUT = Path("perf/results/sweep.json")
MIX: workload.Mix = "uniform"
START_S = 30.0
"""With less than that left no server is started."""

_LEAST_S, _MOST_S, _EACH_S = 60.0, 240.0, 4.0
_KNOWN = {subject.key: subject for subject in subjects()}


@dataclass(frozen=True)
class Options:
    """One run. servers: keys of subjects, in their order. budget_s: for all of it. model: None is one made here."""

    servers: tuple[str, ...]
    budget_s: float
    model: Path | None
    threads: int
    resume: bool
    output: Path
    command: str


def seconds(concurrency: int) -> float:
    """Return how long a concurrency may take: the more at a time, the longer a wave, up to a bound for slow servers."""
    return min(max(_LEAST_S, _EACH_S * concurrency), _MOST_S)


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Parse the command line; a value out of bounds ends the program with one line."""
    cores = len(os.sched_getaffinity(0))
    default = ("inflight_int8", "batched_int8", f"naive_{unquantized()}")
    parser = argparse.ArgumentParser(prog="make sweep", description=__doc__)
    parser.add_argument("servers", nargs="*", metavar="SERVER", help=f"of {', '.join(_KNOWN)}; default {default}")
    parser.add_argument("--budget", type=positive, default=40, metavar="MINUTES", help="for all of it (default 40)")
    parser.add_argument("--model", type=checkpoint_folder, metavar="FOLDER", help="a Llama (default: random weights)")
    parser.add_argument("--threads", type=count, default=cores, metavar="N", help=f"a server's (default {cores})")
    parser.add_argument("--resume", action="store_true", help="measure only what the output file hasn't got yet")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE", help=f"default {OUTPUT}")
    found = parser.parse_args(arguments)
    if unknown := sorted({*found.servers} - {*_KNOWN}):
        parser.error(f"there is no server {unknown[0]!r}: known are {', '.join(_KNOWN)}")
    said = [*found.servers, *(["--threads", str(found.threads)] if found.threads != cores else [])]
    variables = {} if found.model is None else {"MODEL": found.model.name}
    return Options(
        servers=tuple(found.servers) or default,
        budget_s=60 * found.budget,
        model=found.model,
        threads=found.threads,
        resume=found.resume,
        output=found.output,
        command=make_command("sweep", variables, said),
    )


def run(options: Options) -> None:
    """Measure what the options say, and write it down."""
    budget = Budget(options.budget_s)
    checkpoint = options.model or default_checkpoint()
    check_context(checkpoint)
    torch.set_num_threads(options.threads)
    settings = {"model": described(checkpoint), "threads": options.threads}
    try:
        results = Results(options.output, "sweep", settings, options.resume)
    except ValueError as error:
        sys.exit(f"sweep: {error}")
    results.section("command", options.command)
    rates = measured_once(results, options.threads)
    course = Course(results, budget)
    for key in options.servers:
        _sweep(course, _KNOWN[key], checkpoint, options.threads, rates)
    results.finish()
    print(f"\nwritten to {options.output}; make report puts it into docs/benchmarks.md")


def _sweep(course: Course, subject: Subject, checkpoint: Path, threads: int, rates: DeviceRates) -> None:
    """Measure a subject at every concurrency that isn't in the results yet, on one server."""
    left = [number for number in CONCURRENCIES if not course.has(_key(subject, number))]
    if not left:
        return
    course.budget.say(f"{subject.title} at {', '.join(map(str, left))} …")
    try:
        course.refuse_without(START_S)
        for step in sweep(subject, checkpoint, MIX, left, seconds, threads, rates):
            course.note(_key(subject, step.concurrency), step.measurement)
            course.refuse_without(seconds(step.concurrency))
    except Exception as error:  # noqa: BLE001 - as in Course.measure
        for number in left:
            if not course.has(_key(subject, number)):
                course.note(_key(subject, number), {**subject.to_json(), "not_run": reason(error)})


def _key(subject: Subject, concurrency: int) -> str:
    return f"sweep/{subject.key}/{concurrency}"


if __name__ == "__main__":
    try:
        run(parse())
    except KeyboardInterrupt:
        sys.exit("sweep: interrupted; SWEEP=--resume goes on with what was measured")
