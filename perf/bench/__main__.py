"""Measure servers under the same loads, write one file, and print its tables.

Cases, in this order, because the budget may end first:

    article   the article's table (docs/benchmarks.md): naive, batched and INT8, by perf_analyzer
    users     ours, FastAPI and vLLM, streaming to 32, 1, 8 and 128 users
    large     ours and vLLM on TinyLlama's shape
    prefixes  prompts that share prefixes: our prefix cache on and off, and vLLM's
    formats   the larger model in the formats of checkpoints: ours, vLLM and llama.cpp

The last two are by choice alone. What there was no time for is recorded with that reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from perf import environment, report
from perf.analyzer.binary import BadExportError
from perf.bench.loads import FORMATS, LARGE, SLOTS, USERS, Load
from perf.bench.measure import Bench
from perf.bench.prefixes import LARGE_LOADS, POSITIONS, SMALL_LOADS, PrefixLoad
from perf.checkpoint import SMALL, TINY_LLAMA, default_checkpoint, described, random_checkpoint, words_checkpoint
from perf.command import CORES, Budget, existing_checkpoint, make_command, positive
from perf.results_file import RESULTS, Results
from perf.roofline.device import measure_rates
from perf.servers.baselines import prefix_cache_servers, servers
from perf.servers.formats import format_servers
from perf.servers.running import Server
from perf.servers.triton import article_servers


class Run(NamedTuple):
    """Servers of a case that run side by side, one of them busy at any time, and what is put on each."""

    servers: Sequence[Server]
    checkpoint: Path
    loads: Sequence[Load | PrefixLoad]


def _article(model: Path | None) -> Iterator[Run]:
    for server in article_servers():
        yield Run([server], model or default_checkpoint(), [Load("article/equal", "equal", perf_analyzer=True)])


def _users(model: Path | None) -> Iterator[Run]:
    for server in servers():
        # The FastAPI servers answer one and eight at a time, whatever the users.
        loads = [load for load in USERS if load.users == SLOTS] if "fastapi" in server.key else USERS
        yield Run([server], model or default_checkpoint(), loads)


def _large(model: Path | None) -> Iterator[Run]:
    # A model of the user's, or a GPU's default, is large itself.
    if model is None and not torch.cuda.is_available():
        for server in servers():
            if server.weights == "int8" or server.key == "vllm":
                yield Run([server], random_checkpoint(TINY_LLAMA), LARGE)


def _prefixes(model: Path | None) -> Iterator[Run]:
    ours, vllm = prefix_cache_servers()
    for shape, loads in ((SMALL, SMALL_LOADS), (TINY_LLAMA, LARGE_LOADS)):
        for together in (ours, *([server] for server in vllm)):
            yield Run(together, words_checkpoint(shape, POSITIONS), loads)


def _formats(model: Path | None) -> Iterator[Run]:
    for server in format_servers():
        yield Run([server], random_checkpoint(TINY_LLAMA), FORMATS)


CASES: Mapping[str, Callable[[Path | None], Iterator[Run]]] = {
    "article": _article,
    "users": _users,
    "large": _large,
    "prefixes": _prefixes,
    "formats": _formats,
}
"""The runs of each case. model: the user's checkpoint, for article and users."""
BY_DEFAULT = ("article", "users", "large")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; a value out of bounds ends the program with one line."""
    parser = argparse.ArgumentParser(
        prog="make bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--budget", type=positive, default=120.0, metavar="MINUTES", help="for all of it (default 120)")
    add("--model", type=existing_checkpoint, metavar="FOLDER", help="a Llama in safetensors (default: random weights)")
    add("--only", nargs="+", choices=CASES, default=BY_DEFAULT, help="cases to measure")
    ours, vllm = prefix_cache_servers()
    every = [*article_servers(), *servers(), *ours, *vllm, *format_servers()]
    known = sorted({server.key for server in every})
    add("--without", nargs="*", choices=known, metavar="SERVER", default=[], help=f"servers to leave out: {known}")
    add("--output", type=Path, metavar="FILE", help="default: perf/results/bench.json, or bench-CASE.json by choice")
    options = parser.parse_args(arguments)
    if options.output is None:
        (case, *others) = options.only
        options.output = RESULTS / ("bench.json" if others or case in BY_DEFAULT else f"bench-{case}.json")
    return options


def main() -> None:
    """Run what the command line selects."""
    options = parse()
    budget = Budget(options.budget)
    checkpoint = options.model or default_checkpoint()
    settings = {"model": described(checkpoint), "threads": CORES, "concurrency": SLOTS}
    results = Results(options.output, "bench", settings, make_command("bench"))
    budget.say(f"{environment.device()}; {settings['model']}; {CORES} threads")
    rates = measure_rates(CORES)
    results.section("rates", rates.to_json())
    budget.say(rates.describe())
    bench = Bench(results, budget, rates)
    for case in options.only:
        for run in CASES[case](options.model):
            chosen = [server for server in run.servers if server.key not in options.without]
            bench.measure(chosen, run.checkpoint, run.loads)
    results.finish()
    print(f"\n{report.summary(report.read(options.output))}\n")
    print(f"written to {options.output}; make report puts it into the pages")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("bench: interrupted; what was measured is beside the output file, as .partial")
    except BadExportError as error:
        sys.exit(f"bench: {error}")
