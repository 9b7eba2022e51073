"""Measure everything in one run, write it to one file, and print its tables.

The budget may end first, so the order is by importance and duration: the article's table, the same at mixed lengths,
other servers at 32 users, the same with fewer and more users, and TinyLlama's shape. Skipped measurements are recorded
with the reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from perf.bench.articles import tables
from perf.bench.peers import SLOTS, Loads, at_default_users, by_users, large
from perf.checkpoint import FOLDER, TINY_LLAMA, default_checkpoint, described, random_checkpoint
from perf.command import CORES, begin, run_command, run_parser, typed_options
from perf.course import START_S
from perf.report.results import read
from perf.report.tables import summary
from perf.servers.baselines import servers
from perf.servers.running import Server
from perf.workload import Mix

SECTIONS = ("article", "mixed", "peers", "users", "large")
# Mixes of the article's tables, and their share of the time left when each begins, so that time saved is passed on.
_TABLES: dict[str, tuple[list[Mix], float]] = {
    "article": (["equal"], 0.15),
    "mixed": (["uniform", "geometric"], 0.2),
}
_LARGE = ("triton_llama_int8", "vllm", "vllm_int8", "triton_llama_bf16", "triton_llama_fp32")
"""Servers of the larger model, the slowest last."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; a value out of bounds ends the program with one line."""
    parser = run_parser("make bench", __doc__, 120, "perf/results/bench.json")
    add = parser.add_argument
    add("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections (default: all)")
    add("--without", nargs="*", metavar="SERVER", default=[], help="baselines to leave out: vllm …")
    options = parser.parse_args(arguments)
    known = [server.key for server in servers()]
    if unknown := sorted({*options.without} - {*known}):
        parser.error(f"--without has {unknown[0]!r}: known are {', '.join(known)}")
    # A file elsewhere is this machine's.
    names = ["only", "without"] if options.output.is_absolute() else ["only", "without", "output"]
    options.command = run_command("bench", options, typed_options(parser, options, names))
    return options


def main() -> None:
    """Run what the command line selects."""
    options = parse()
    checkpoint = options.model or default_checkpoint()
    settings = {"model": described(checkpoint), "threads": CORES, "concurrency": SLOTS}
    course, rates = begin("bench", options, settings, options.command)
    for section, (mixes, share) in _TABLES.items():
        if section in options.only:
            tables(course, SLOTS, checkpoint, rates, mixes, share * course.budget.left)
    chosen = [server for server in servers() if server.key not in options.without]
    loads = Loads(course, checkpoint, rates)
    if "peers" in options.only:
        loads.measure(chosen, at_default_users())
    if "users" in options.only:
        # The FastAPI servers answer one and eight at a time, whatever the users.
        loads.measure([server for server in chosen if "fastapi" not in server.key], by_users())
    # A model of the user's, or a GPU's default, is large itself.
    if "large" in options.only and options.model is None and not torch.cuda.is_available():
        larger_model(loads, chosen)
    course.results.finish()
    print(f"\n{summary(read(options.output))}\n")
    print(f"written to {options.output}; make report puts it into the pages")


def larger_model(loads: Loads, chosen: Sequence[Server]) -> None:
    """Measure some of the servers with TinyLlama's shape."""
    some = sorted((server for server in chosen if server.key in _LARGE), key=lambda server: _LARGE.index(server.key))
    # Without the time to start a server its loads are only recorded as not run: no checkpoint of 2 GB is made for that.
    if loads.course.budget.left >= START_S:
        loads = replace(loads, checkpoint=random_checkpoint(TINY_LLAMA, FOLDER))
    loads.measure(some, large())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("bench: interrupted; what was measured is beside the output file, as .partial")
