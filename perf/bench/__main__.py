"""Measure everything in one run, write it to one file, and print its tables.

The budget may end first, so the order is by importance and duration: the article's table, the same at mixed lengths,
where the time goes, and the baselines. (`bench.sweep` measures over concurrencies.) Skipped
measurements are recorded with the reason.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import torch

from perf.bench import articles
from perf.bench.baselines import baselines
from perf.bench.options import Options, parse
from perf.checkpoint import check_context, default_checkpoint, described
from perf.command import make_command
from perf.course import Budget, Course, reason
from perf.overhead.account import account
from perf.report import tables
from perf.report.results import read
from perf.results_file import Results
from perf.roofline.device import measured_once
from perf.workload import Mix

# Mixes of the article's tables, and their share of the time left when each begins, so that time saved is passed on.
_TABLES: dict[str, tuple[list[Mix], float]] = {
    "article": (["equal"], 0.25),
    "mixed": (["uniform", "geometric"], 0.3),
}
_ACCOUNT_S = 240.0
_SLOTS = 32


def main() -> None:
    """Run what the command line selects."""
    options = parse()
    budget = Budget(options.budget_s)
    checkpoint = options.model or default_checkpoint()
    check_context(checkpoint)
    torch.set_num_threads(options.threads)
    # A run is resumed under the same ones; the sections may differ.
    settings = {
        "model": described(checkpoint),
        "threads": options.threads,
        "concurrency": options.concurrency,
        "slo": asdict(options.slo),
    }
    try:
        results = Results(options.output, "bench", settings, options.resume)
    except ValueError as error:
        sys.exit(f"bench: {error}")
    results.section("command", _command(options, results.get("command")))
    course = Course(results, budget)
    budget.say(f"{results.device}; {described(checkpoint)}; {options.threads} threads a server")
    rates = measured_once(results, options.threads)
    budget.say(rates.describe())
    for section, (mixes, share) in _TABLES.items():
        if section in options.sections:
            seconds = share * budget.left
            articles.tables(course, options.concurrency, options.threads, checkpoint, rates, mixes, seconds)
    if "overhead" in options.sections and results.get("overhead") is None:
        _account(course, options, checkpoint)
    if "peers" in options.sections:
        baselines(course, options, checkpoint, rates)
    results.finish()
    print(f"\n{tables.summary(read(options.output))}\n")
    print(f"written to {options.output}; make report puts it into README.md")


def _command(options: Options, before: object) -> str:
    """Return the command that repeats the run. before: the command of the resumed run, or None."""
    variables = {} if options.model is None else {"MODEL": options.model.name}
    command = make_command("bench", variables, options.given)
    return command if before in (None, command) else f"{before}; {command}"


def _account(course: Course, options: Options, checkpoint: Path) -> None:
    try:
        course.refuse_without(_ACCOUNT_S)
        found = account(checkpoint, "int8", "uniform", 2 * _SLOTS, 3 * _SLOTS, options.threads, say=course.budget.say)
    except Exception as error:  # noqa: BLE001 - as in Course.measure: the tables are printed all the same
        course.budget.say(f"overhead: not run: {reason(error)}")
    else:
        course.results.section("overhead", found)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("bench: interrupted; BENCH=--resume goes on with what was measured")
