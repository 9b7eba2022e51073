"""Measure everything in one run, write it to one file, and print its tables.

The budget may end first, so the order is that of importance and of length: the article's table, the same at mixed
lengths, where the time goes, and the peers. (The sweep over concurrencies is `bench.sweep`.) What there was no time for
says so in the results.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from perf.bench import articles, rivals
from perf.bench.options import Options, parse
from perf.checkpoint import check_context, default_checkpoint, described
from perf.command import make_command
from perf.course import Budget, Course, reason
from perf.overhead.account import account
from perf.report import tables
from perf.report.results import read
from perf.results import Results
from perf.roofline.device import measured_once

# Of the time that is left when each begins, so that an early end of one is the next ones' gain.
_SHARES = {"article": 0.25, "mixed": 0.3}
_ACCOUNT_S = 240.0


def main() -> None:
    """Run what the command line says."""
    options = parse()
    budget = Budget(options.budget_s)
    checkpoint = options.model or default_checkpoint()
    check_context(checkpoint)
    torch.set_num_threads(options.threads)
    try:
        results = Results(options.output, "bench", _settings(options, checkpoint), options.resume)
    except ValueError as error:
        sys.exit(f"bench: {error}")
    results.section("command", _command(options, results.get("command")))
    course = Course(results, budget)
    budget.say(f"{results.device}; {described(checkpoint)}; {options.threads} threads a server")
    rates = measured_once(results, options.threads)
    budget.say(rates.describe())
    if "article" in options.sections:
        articles.tables(course, options, checkpoint, rates, ["equal"], _SHARES["article"] * budget.left)
    if "mixed" in options.sections:
        articles.tables(course, options, checkpoint, rates, ["uniform", "geometric"], _SHARES["mixed"] * budget.left)
    if "overhead" in options.sections and results.get("overhead") is None:
        _account(course, options, checkpoint)
    if "peers" in options.sections:
        rivals.peers(course, options, checkpoint, rates)
    results.finish()
    print(
        f"\n{tables.summary(read(options.output))}\n\nwritten to {options.output}; make report puts it into README.md"
    )


def _settings(options: Options, checkpoint: Path) -> dict[str, object]:
    """Return what a run is resumed with; which parts of it are measured may differ."""
    return {
        "model": described(checkpoint),
        "threads": options.threads,
        "concurrency": options.concurrency,
        "slo": {"time_to_first_token_s": options.slo.time_to_first_token_s,
                "inter_token_latency_s": options.slo.inter_token_latency_s},
    }  # fmt: skip


def _command(options: Options, before: object) -> str:
    """Return how to measure this again; before: the command of what is resumed, or None."""
    variables = {} if options.model is None else {"MODEL": options.model.name}
    command = make_command("bench", variables, options.said)
    return command if before in (None, command) else f"{before}; {command}"


def _account(course: Course, options: Options, checkpoint: Path) -> None:
    slots = 32
    try:
        course.refuse_without(_ACCOUNT_S)
        found = account(checkpoint, "int8", "uniform", 2 * slots, 3 * slots, options.threads, say=course.budget.say)
    except Exception as error:  # noqa: BLE001 - as in Course.measure: the tables are to be printed all the same
        course.budget.say(f"overhead: not run: {reason(error)}")
    else:
        course.results.section("overhead", found)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("bench: interrupted; BENCH=--resume goes on with what was measured")
