"""The command line of `make bench`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from perf.command import CORES, count, positive, run_parser
from perf.load.summary import SLO
from perf.servers.baselines import servers

SECTIONS = ("article", "mixed", "peers", "overhead")
CONCURRENCY = 32
OUTPUT = Path("perf/results/bench.json")


@dataclass(frozen=True)
class Options:
    """One run. model: a checkpoint's folder, None for random weights. sections: of SECTIONS. without: baselines.

    given: the options that change what is measured, as typed.
    """

    budget_s: float
    model: Path | None
    concurrency: int
    threads: int
    sections: tuple[str, ...]
    without: tuple[str, ...]
    slo: SLO
    resume: bool
    output: Path
    given: tuple[str, ...]


def parse(arguments: list[str] | None = None) -> Options:
    """Parse the command line; a value out of bounds ends the program with one line."""
    parser = run_parser("make bench", __doc__, 60, OUTPUT)
    add = parser.add_argument
    add("--concurrency", type=count, default=CONCURRENCY, metavar="N", help=f"users (default {CONCURRENCY})")
    add("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections (default: all)")
    add("--without", nargs="*", metavar="SERVER", default=[], help="baselines to leave out: vllm …")
    add("--slo-ttft-ms", type=positive, default=2000.0, metavar="MS", help="goodput: TTFT (default 2000)")
    add("--slo-itl-ms", type=positive, default=100.0, metavar="MS", help="goodput: mean ITL (default 100)")
    found = parser.parse_args(arguments)
    known = [server.key for server in servers()]
    if unknown := sorted({*found.without} - {*known}):
        parser.error(f"--without has {unknown[0]!r}: known are {', '.join(known)}")
    return Options(
        budget_s=60 * found.budget,
        model=found.model,
        concurrency=found.concurrency,
        threads=found.threads,
        sections=tuple(section for section in SECTIONS if section in found.only),
        without=tuple(found.without),
        slo=SLO(found.slo_ttft_ms / 1e3, found.slo_itl_ms / 1e3),
        resume=found.resume,
        output=found.output,
        given=_given(found),
    )


def _given(found: argparse.Namespace) -> tuple[str, ...]:
    given: list[str] = []
    for option, value, default in (
        ("--concurrency", found.concurrency, CONCURRENCY),
        ("--threads", found.threads, CORES),
    ):
        if value != default:
            given += [option, str(value)]
    for option, names, all_names in (("--only", found.only, [*SECTIONS]), ("--without", found.without, [])):
        if names != all_names:
            given += [option, *names]
    return tuple(given)
