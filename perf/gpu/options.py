"""The command line of a GPU run, and how much of everything is measured."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from perf.checkpoint import LLAMA_2_7B, Shape
from perf.command import count, make_command, positive
from perf.gpu.capacity import Extent
from perf.results import PARTIAL

PARTS = ("environment", "correct", "stock", "capacity", "decode", "graph", "quality", "products", "article", "tiles")
DEFAULT = PARTS[:-1]
"""Tiles take minutes to compile: for the developer who chooses one."""
OUTPUT = Path("perf/results/gpu.json")
SMOKE_OUTPUT = Path(".work/gpu/smoke.json")
"""Not among the results: a smoke run's figures mean nothing."""
BUDGET = 8
"""Minutes."""

TINY = Shape(64, 128, 2, 4, 2, 3072, 512, "float32")


@dataclass(frozen=True)
class Amount:
    """How much is measured; seconds of a single measurement unless noted.

    batches, exact_s: of the token comparison, whichever ends first. rows, steps: of the logit comparison.
    texts: rows of held-out text for the quality, each of `context` tokens. prompt, output: tokens of a wave's rows.
    decode_rows, graph_rows, product_rows: row counts, one measurement each, the aims' first in case time runs out.
    """

    shape: Shape
    batches: int
    exact_s: float
    rows: int
    steps: int
    texts: int
    context: int
    prompt: int
    output: int
    decode_rows: tuple[int, ...]
    graph_rows: tuple[int, ...]
    product_rows: tuple[int, ...]
    product_s: float
    rates_s: float
    extent: Extent


FULL = Amount(
    shape=LLAMA_2_7B,
    batches=200, exact_s=16.0, rows=16, steps=48, texts=40, context=512,
    prompt=100, output=200, decode_rows=(32, 1, 64, 16, 8),
    graph_rows=(32, 1, 64),
    product_rows=(1, 8, 16, 32, 64, 512), product_s=0.1, rates_s=0.4,
    extent=Extent(slots=32, max_model_len=1024, steps=10_000, seconds=12.0, scarce_rows=32, scarce_mib=256),
)  # fmt: skip

SMOKE = Amount(
    shape=TINY,
    batches=2, exact_s=5.0, rows=3, steps=3, texts=2, context=64,
    prompt=10, output=4, decode_rows=(2, 1),
    graph_rows=(2,),
    product_rows=(1, 8), product_s=0.001, rates_s=0.001,
    extent=Extent(slots=4, max_model_len=128, steps=20, seconds=2.0, scarce_rows=4, scarce_mib=None),
)  # fmt: skip
"""Everything once, on a tiny model."""


@dataclass(frozen=True)
class Options:
    """One run. parts: of PARTS, in their order. partial: folder of the file that is written during the run.

    kernels: the setting, wherever stock kernels aren't measured by name.
    """

    device: torch.device
    smoke: bool
    parts: tuple[str, ...]
    budget_s: float
    threads: int
    resume: bool
    output: Path
    partial: Path
    amount: Amount
    kernels: str
    command: str


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Parse the command line; a value out of bounds ends the program with one line."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="make bench-gpu", description=__doc__)
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    add("--smoke", action="store_true", help="everything once, on a tiny model: does the program work?")
    add("--only", nargs="+", choices=PARTS, default=list(DEFAULT), help="default: all but tiles")
    add("--budget", type=positive, default=BUDGET, metavar="MINUTES", help=f"for all of it (default {BUDGET})")
    add("--threads", type=count, default=cores, metavar="N", help=f"on a CPU (default {cores})")
    add("--steady-seconds", type=positive, metavar="S", help=f"of full load in each precision, "
        f"{FULL.extent.steps:,} steps at most (default {FULL.extent.seconds:g})")  # fmt: skip
    add("--kernels", choices=("stock", "fused"), default="fused", help="stock: if a fused kernel breaks the device")
    add("--resume", action="store_true", help="measure only what the output file doesn't contain")
    add("--output", type=Path, metavar="FILE", help=f"default {OUTPUT}, or with --smoke {SMOKE_OUTPUT}")
    add("--partial", type=Path, default=PARTIAL, metavar="FOLDER", help="for the file written during the run")
    found = parser.parse_args(arguments)
    if found.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but PyTorch sees no GPU")
    cuda = found.device != "cpu" and torch.cuda.is_available()
    if not cuda and not found.smoke:
        cpu = "on a CPU there is only --smoke: a model of this size would take hours"
        parser.error(cpu if found.device == "cpu" else "PyTorch sees no GPU; --smoke tries the program out on a CPU")
    amount = SMOKE if found.smoke else FULL
    if found.steady_seconds is not None:
        amount = replace(amount, extent=replace(amount.extent, seconds=found.steady_seconds))
    parts = tuple(part for part in PARTS if part in found.only)
    return Options(
        device=torch.device("cuda", 0) if cuda else torch.device("cpu"),
        smoke=found.smoke,
        parts=parts,
        budget_s=60 * found.budget,
        threads=found.threads,
        resume=found.resume,
        output=found.output or (SMOKE_OUTPUT if found.smoke else OUTPUT),
        partial=found.partial,
        amount=amount,
        kernels=found.kernels,
        command=_command(found, parts),
    )


def _command(found: argparse.Namespace, parts: tuple[str, ...]) -> str:
    """Return the command that repeats the run."""
    words = [*(["--smoke"] if found.smoke else []), *(["--only", *parts] if parts != DEFAULT else [])]
    if found.steady_seconds is not None:
        words += ["--steady-seconds", f"{found.steady_seconds:g}"]
    if found.kernels != "fused":
        words += ["--kernels", found.kernels]
    variables = {} if found.budget == BUDGET else {"BUDGET": f"{found.budget:g}"}
    return make_command("bench-gpu", variables, words)
