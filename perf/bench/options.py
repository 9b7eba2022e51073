"""What a run can be told on its command line. Knows the bounds; nothing is measured here."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from perf.command import checkpoint_folder, count, positive
from perf.load.summary import SLO
from perf.peers.lineup import lineup

SECTIONS = ("article", "mixed", "peers", "overhead")
CONCURRENCY = 32
OUTPUT = Path("perf/results/bench.json")


@dataclass(frozen=True)
class Options:
    """One run. budget_s: for all of it. model: a checkpoint's folder, None is one of random weights made on the spot.

    sections: of SECTIONS. said: the options that change what is measured, as they would be said again.
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
    said: tuple[str, ...]


def parse(arguments: list[str] | None = None) -> Options:
    """Parse the command line; a value out of bounds ends the program with one line."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--budget", type=positive, default=60, metavar="MINUTES", help="for all of it (default 60)")
    parser.add_argument("--model", type=checkpoint_folder, metavar="FOLDER", help="a Llama (default: random weights)")
    parser.add_argument(
        "--concurrency",
        type=count,
        default=CONCURRENCY,
        metavar="N",
        help=f"requests at a time (default {CONCURRENCY})",
    )
    parser.add_argument(
        "--threads", type=count, default=cores, metavar="N", help=f"that compute in each server (default {cores})"
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="default: all")
    parser.add_argument("--without", nargs="*", metavar="PEER", default=[], help="peers to leave out: vllm …")
    parser.add_argument(
        "--slo-ttft-ms",
        type=positive,
        default=2000.0,
        metavar="MS",
        help="goodput: time to first token (default 2000)",
    )
    parser.add_argument(
        "--slo-itl-ms",
        type=positive,
        default=100.0,
        metavar="MS",
        help="goodput: mean inter-token latency (default 100)",
    )
    parser.add_argument("--resume", action="store_true", help="measure only what the output file hasn't got yet")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE", help=f"default {OUTPUT}")
    found = parser.parse_args(arguments)
    known = [one.key for one in lineup()]
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
        said=_said(found, cores),
    )


def _said(found: argparse.Namespace, cores: int) -> tuple[str, ...]:
    said: list[str] = []
    if found.concurrency != CONCURRENCY:
        said += ["--concurrency", str(found.concurrency)]
    if found.threads != cores:
        said += ["--threads", str(found.threads)]
    for option, names, all_of_it in (("--only", found.only, [*SECTIONS]), ("--without", found.without, [])):
        if names != all_of_it:
            said += [option, *names]
    return tuple(said)
