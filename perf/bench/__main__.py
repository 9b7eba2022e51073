"""Measure everything in one run, write it to one file, and print its tables.

The budget may end first, so the order is by importance and duration: the article's table, the same at mixed lengths,
where the time goes, the baselines, the same with fewer and more users, and TinyLlama's shape. (`bench.sweep` measures
our configurations over concurrencies.) Skipped measurements are recorded with the reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from perf.bench.articles import tables
from perf.bench.baselines import SLOTS, Loads, by_users, large, peers
from perf.checkpoint import FOLDER, TINY_LLAMA, default_checkpoint, described, random_checkpoint
from perf.command import CORES, begin, given, run_command, run_parser
from perf.course import START_S, Course, reason
from perf.load.summary import SLO
from perf.overhead.account import account
from perf.report.results import read
from perf.report.tables import summary
from perf.roofline.rates import DeviceRates
from perf.servers.baselines import servers
from perf.servers.running import Server
from perf.workload import Mix

SECTIONS = ("article", "mixed", "peers", "overhead", "users", "large")
# Mixes of the article's tables, and their share of the time left when each begins, so that time saved is passed on.
_TABLES: dict[str, tuple[list[Mix], float]] = {
    "article": (["equal"], 0.15),
    "mixed": (["uniform", "geometric"], 0.2),
}
OBJECTIVE = SLO(time_to_first_token_s=2.0, inter_token_latency_s=0.1)
"""Of goodput."""
_ACCOUNT_S = 240.0
_LARGE = ("triton_llama_int8", "vllm", "vllm_int8", "triton_llama_bf16", "triton_llama_fp32")
"""Servers of the larger model, the slowest last."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; a value out of bounds ends the program with one line."""
    parser = run_parser("make bench", __doc__, 120, "perf/results/bench.json")
    add = parser.add_argument
    add("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections (default: all)")
    add("--without", nargs="*", metavar="SERVER", default=[], help="baselines to leave out: vllm …")
    found = parser.parse_args(arguments)
    known = [server.key for server in servers()]
    if unknown := sorted({*found.without} - {*known}):
        parser.error(f"--without has {unknown[0]!r}: known are {', '.join(known)}")
    # A file elsewhere is this machine's.
    names = ["only", "without"] if found.output.is_absolute() else ["only", "without", "output"]
    found.command = run_command("bench", found, given(parser, found, names))
    return found


def main() -> None:
    """Run what the command line selects."""
    options = parse()
    checkpoint = options.model or default_checkpoint()
    settings = {"model": described(checkpoint), "threads": CORES, "concurrency": SLOTS, "slo": asdict(OBJECTIVE)}
    course, rates = begin("bench", options, settings, options.command)
    for section, (mixes, share) in _TABLES.items():
        if section in options.only:
            tables(course, SLOTS, checkpoint, rates, mixes, share * course.budget.left)
    if "overhead" in options.only and course.results.get("overhead") is None:
        _account(course, checkpoint, rates)
    chosen = [server for server in servers() if server.key not in options.without]
    loads = Loads(course, checkpoint, OBJECTIVE, rates)
    if "peers" in options.only:
        loads.measure(chosen, peers())
    if "users" in options.only:
        # The FastAPI servers answer one and eight at a time, whatever the users.
        loads.measure([server for server in chosen if "fastapi" not in server.key], by_users())
    # A model of the user's, or a GPU's default, is large itself.
    if "large" in options.only and options.model is None and not torch.cuda.is_available():
        larger_model(loads, chosen)
    course.results.finish()
    print(f"\n{summary(read(options.output))}\n")
    print(f"written to {options.output}; make report puts it into README.md")


def larger_model(loads: Loads, chosen: Sequence[Server]) -> None:
    """Measure some of the servers with TinyLlama's shape."""
    some = sorted((one for one in chosen if one.key in _LARGE), key=lambda one: _LARGE.index(one.key))
    # Without the time to start a server its loads are only recorded as not run: no checkpoint of 2 GB is made for that.
    if loads.course.budget.left >= START_S:
        loads = replace(loads, checkpoint=random_checkpoint(TINY_LLAMA, FOLDER))
    loads.measure(some, large())


def _account(course: Course, checkpoint: Path, rates: DeviceRates) -> None:
    try:
        course.refuse_without(_ACCOUNT_S)
        found = account(checkpoint, CORES, rates, course.budget.say)
    except Exception as error:  # noqa: BLE001 - as in Course.measure: the tables are printed all the same
        course.budget.say(f"overhead: not run: {reason(error)}")
    else:
        course.results.section("overhead", found)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("bench: interrupted; BENCH=--resume goes on with what was measured")
