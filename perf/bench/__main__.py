"""Measure everything in one run, write it to one file, and print its tables.

The budget may end first, so the order is by importance and duration: the table of the article with which this project
began (naive, batched and INT8; docs/benchmarks.md), the same at mixed lengths, other servers at 32 users, the same with
fewer and more users, and on a CPU without --model TinyLlama's shape. What there was no time for is recorded with that
reason. Two measurements on a CPU are by choice alone: prefix caches (`perf.bench.prefixes`), and checkpoint formats of
the larger model (`perf.servers.formats`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from perf import environment
from perf.bench.loads import FORMATS, LARGE, SECTIONS, SLOTS, Bench
from perf.bench.prefixes import (
    CONTEXT_LOADS,
    CONTEXT_POSITIONS,
    KV_CACHE_TOKENS,
    LARGE_LOADS,
    POSITIONS,
    SMALL_LOADS,
)
from perf.checkpoint import SMALL, TINY_LLAMA, default_checkpoint, described, random_checkpoint, words_checkpoint
from perf.command import CORES, Budget, existing_checkpoint, make_command, positive
from perf.report.prefixes import context, prefixes
from perf.report.results import RESULTS, NotMeasuredError, read
from perf.report.tables import formats, summary
from perf.results_file import Results
from perf.roofline.device import measure_rates
from perf.servers.baselines import prefix_cache_servers, servers, small_pool_server
from perf.servers.formats import format_servers
from perf.servers.running import Server
from perf.servers.triton import article_servers

PREFIXES = ("prefixes", "prefixes-large", "context")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; a value out of bounds ends the program with one line."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    add = parser.add_argument
    add("--budget", type=positive, default=120.0, metavar="MINUTES", help="for all of it (default 120)")
    add("--model", type=existing_checkpoint, metavar="FOLDER", help="a Llama in safetensors (default: random weights)")
    sections = [*SECTIONS, "large"]
    add(
        "--only",
        nargs="+",
        choices=[*sections, *PREFIXES, "formats"],
        default=sections,
        help=f"default: {' '.join(sections)}",
    )
    ours, vllm = prefix_cache_servers()
    known = sorted({server.key for server in [*servers(), *ours, *vllm, *format_servers()]})
    add("--without", nargs="*", choices=known, metavar="SERVER", default=[], help=f"servers to leave out: {known}")
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="default: perf/results/bench.json, of sections by choice bench-prefixes.json, bench-formats.json",
    )
    options = parser.parse_args(arguments)
    if options.output is None:
        alone = {"bench-prefixes.json": set(PREFIXES), "bench-formats.json": {"formats"}}
        files = [name for name, sections in alone.items() if set(options.only) <= sections]
        options.output = RESULTS / (files[0] if files else "bench.json")
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
    peers = [server for server in servers() if server.key not in options.without]
    for section, loads in SECTIONS.items():
        if section in options.only:
            for server in chosen(section, peers):
                bench.measure([server], checkpoint, loads)
    # A model of the user's, or a GPU's default, is large itself.
    if "large" in options.only and options.model is None and not torch.cuda.is_available():
        larger = random_checkpoint(TINY_LLAMA)
        for server in chosen("large", peers):
            bench.measure([server], larger, LARGE)
    for section in options.only:
        if section in PREFIXES:
            measure_prefixes(bench, section, options.without)
        if section == "formats":
            measure_formats(bench, options.without)
    results.finish()
    result = read(options.output)
    print(f"\n{summary(result)}\n")
    for make in (prefixes, context, formats):
        with suppress(NotMeasuredError):
            print(f"{make(result)}\n")
    print(f"written to {options.output}; make report puts it into the pages")


def measure_prefixes(bench: Bench, section: str, without: Sequence[str]) -> None:
    """Measure a section of prefixes. Ours with its cache on and off run side by side, one of them idle at any time."""
    if section == "context":
        checkpoint = words_checkpoint(SMALL, CONTEXT_POSITIONS)
        bench.measure([small_pool_server(KV_CACHE_TOKENS)], checkpoint, CONTEXT_LOADS)
        return
    shape, loads = (SMALL, SMALL_LOADS) if section == "prefixes" else (TINY_LLAMA, LARGE_LOADS)
    ours, vllm = prefix_cache_servers()
    for together in (ours, *([server] for server in vllm)):
        measured = [server for server in together if server.key not in without]
        bench.measure(measured, words_checkpoint(shape, POSITIONS), loads)


def measure_formats(bench: Bench, without: Sequence[str]) -> None:
    """Measure the larger model in the formats of checkpoints."""
    for server in format_servers():
        if server.key not in without:
            bench.measure([server], random_checkpoint(TINY_LLAMA), FORMATS)


def chosen(section: str, peers: Sequence[Server]) -> list[Server]:
    """Return a section's servers in the order of their measurement."""
    if section == "article":
        return article_servers()
    if section == "mixed":
        # A CPU computes FP16 many times slower than FP32; the table of equal lengths shows that cost.
        return [server for server in article_servers() if server.weights != "fp16" or torch.cuda.is_available()]
    if section == "peers":
        # The slowest one last, as of the article's.
        return sorted(peers, key=lambda server: server.key == "naive_fastapi")
    if section == "users":
        # The FastAPI servers answer one and eight at a time, whatever the users.
        return [server for server in peers if "fastapi" not in server.key]
    return [server for server in peers if server.key.startswith(("triton_llama", "vllm"))]


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("bench: interrupted; what was measured is beside the output file, as .partial")
