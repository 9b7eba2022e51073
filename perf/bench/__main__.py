"""Measure everything in one run, write it to one file, and print its tables.

The budget may end first, so the order is that of importance and of length: the article's table, the same at mixed
lengths, where the time goes, the peers, and the sweeps that were asked for. What there was no time for says so in the
results.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import torch
from limit import device
from limit.rates import DeviceRates
from overhead.account import account
from report import terminal
from report.run import read
from setting import workload
from setting.budget import Budget
from setting.checkpoint import FOLDER, default_checkpoint
from setting.results import Results
from transformers import LlamaConfig, LlamaForCausalLM

from bench import articles, rivals
from bench.course import Course, reason
from bench.options import Options, parse

# Of the time that is left when each begins, so that an early end of one is the next ones' gain.
_SHARES = {"article": 0.25, "mixed": 0.3}
_ACCOUNT_S = 240.0
_SWEEP_S = 60.0


def main() -> None:
    """Run what the command line says."""
    options = parse()
    budget = Budget(options.budget_s)
    checkpoint = options.model or default_checkpoint()
    _check_context(checkpoint)
    torch.set_num_threads(options.threads)
    try:
        results = Results(options.output, "bench", _settings(options, checkpoint), options.resume)
    except ValueError as error:
        sys.exit(f"bench: {error}")
    results.section("command", _command(options, results.get("command")))
    course = Course(results, budget)
    budget.say(f"{results.device}; {_described(checkpoint)}; {options.threads} threads a server")
    rates = _rates(course, options)
    budget.say(rates.describe())
    if "article" in options.sections:
        articles.tables(course, options, checkpoint, rates, ["equal"], _SHARES["article"] * budget.left)
    if "mixed" in options.sections:
        articles.tables(course, options, checkpoint, rates, ["uniform", "geometric"], _SHARES["mixed"] * budget.left)
    if "overhead" in options.sections and results.get("overhead") is None:
        _account(course, options, checkpoint)
    if "peers" in options.sections:
        rivals.peers(course, options, checkpoint, rates)
    articles.sweeps(course, options, checkpoint, rates, _SWEEP_S)
    results.finish()
    print(
        f"\n{terminal.summary(read(options.output))}\n\nwritten to {options.output}; make report puts it into README.md"
    )


def _check_context(checkpoint: Path) -> None:
    positions = LlamaConfig.from_pretrained(checkpoint).max_position_embeddings
    needed = workload.PROMPT_TOKENS + workload.LONGEST_OUTPUT
    if positions < needed:
        sys.exit(
            f"bench: {checkpoint} has {positions} positions; prompts of {workload.PROMPT_TOKENS} tokens and answers of "
            f"up to {workload.LONGEST_OUTPUT} need {needed}"
        )


def _settings(options: Options, checkpoint: Path) -> dict[str, object]:
    """Return what a run is resumed with; which parts of it are measured may differ."""
    return {
        "model": _described(checkpoint),
        "threads": options.threads,
        "concurrency": options.concurrency,
        "slo": {"time_to_first_token_s": options.slo.time_to_first_token_s,
                "inter_token_latency_s": options.slo.inter_token_latency_s},
    }  # fmt: skip


def _command(options: Options, before: object) -> str:
    """Return how to measure this again; before: the command of what is resumed, or None."""
    said = [] if options.model is None else [f"MODEL={options.model.name}"]
    said += [f"BENCH={' '.join(options.said)}"] if options.said else []
    command = shlex.join(["make", "bench", *said])
    return command if before in (None, command) else f"{before}; {command}"


def _described(checkpoint: Path) -> str:
    config = LlamaConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in LlamaForCausalLM(config).parameters())
    random = ", random weights" if checkpoint.is_relative_to(FOLDER) else ""
    return f"Llama of {count / 1e6:,.1f} million parameters ({checkpoint.name}{random})"


def _rates(course: Course, options: Options) -> DeviceRates:
    """Return the device's rates, measured once a file."""
    found = course.results.get("rates")
    if found is not None:
        return DeviceRates.from_json(found)  # type: ignore[arg-type]  # as `to_json` has written it
    rates = device.measure(options.threads)
    course.results.section("rates", rates.to_json())
    return rates


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
    main()
