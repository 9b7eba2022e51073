"""What a run on a GPU can be told on its command line, and how much is done of everything. Nothing is measured here."""

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
"""Trying the ways to cut a weight takes minutes of compiling: it is for those who choose one."""
OUTPUT = Path("perf/results/gpu.json")
SMOKE_OUTPUT = Path(".work/gpu/smoke.json")
"""Not among the results, which are reported on: its figures mean nothing."""
BUDGET = 8
"""Minutes."""

TINY = Shape(64, 128, 2, 4, 2, 3072, 512, "float32")


@dataclass(frozen=True)
class Amount:
    """How much is measured. Seconds are of a single measurement, where nothing else is said.

    batches, exact_s: of the token comparison, whichever ends first. rows, steps: of the logit comparison.
    texts: rows of held-out text for the quality, each of `context` tokens. prompt, output: tokens of a wave's rows.
    decode_rows, graph_rows, product_rows: row counts, one measurement each.
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
"""decode_rows, graph_rows: the aims' first, should the time end."""

SMOKE = Amount(
    shape=TINY,
    batches=2, exact_s=5.0, rows=3, steps=3, texts=2, context=64,
    prompt=10, output=4, decode_rows=(2, 1),
    graph_rows=(2,),
    product_rows=(1, 8), product_s=0.001, rates_s=0.001,
    extent=Extent(slots=4, max_model_len=128, steps=20, seconds=2.0, scarce_rows=4, scarce_mib=None),
)  # fmt: skip
"""Everything once, of a tiny model: does the program work? Its figures mean nothing."""


@dataclass(frozen=True)
class Options:
    """One run. parts: of PARTS, in their order. partial: folder of the file that is written while it runs.

    steady_s: for the capacity of each precision, if another amount was asked for. kernels: the setting, of everything
    that isn't stock by its name.
    """

    device: torch.device
    smoke: bool
    parts: tuple[str, ...]
    budget_s: float
    threads: int
    resume: bool
    output: Path
    partial: Path
    steady_s: float | None
    kernels: str
    command: str

    @property
    def amount(self) -> Amount:
        """How much is measured."""
        amount = SMOKE if self.smoke else FULL
        if self.steady_s is None:
            return amount
        return replace(amount, extent=replace(amount.extent, seconds=self.steady_s))


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Parse the command line; a value out of bounds ends the program with one line."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="make bench-gpu", description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--smoke", action="store_true", help="everything once, of a tiny model: does the program work?")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(DEFAULT), help="default: all but tiles")
    parser.add_argument(
        "--budget", type=positive, default=BUDGET, metavar="MINUTES", help=f"for all of it (default {BUDGET})"
    )
    parser.add_argument("--threads", type=count, default=cores, metavar="N", help=f"on a CPU (default {cores})")
    parser.add_argument(
        "--steady-seconds",
        type=positive,
        metavar="S",
        help=f"of full load in each precision, {FULL.extent.steps:,} steps at most (default {FULL.extent.seconds:g})",
    )
    parser.add_argument(
        "--kernels", choices=("stock", "fused"), default="fused", help="stock: if a fused kernel breaks the device"
    )
    parser.add_argument("--resume", action="store_true", help="measure only what the output file hasn't got yet")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"default {OUTPUT}, or with --smoke {SMOKE_OUTPUT}")
    parser.add_argument("--partial", type=Path, default=PARTIAL, metavar="FOLDER", help="for the file of a running run")
    found = parser.parse_args(arguments)
    if found.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but PyTorch sees no GPU")
    if found.device == "cpu" and not found.smoke:
        parser.error("on a CPU there is only --smoke: a model of this size would take hours")
    cuda = found.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if device.type == "cpu" and not found.smoke:
        parser.error("PyTorch sees no GPU; --smoke tries the program out on a CPU")
    parts = tuple(part for part in PARTS if part in found.only)
    said = [*(["--smoke"] if found.smoke else []), *(["--only", *parts] if parts != DEFAULT else [])]
    if found.steady_seconds is not None:
        said += ["--steady-seconds", f"{found.steady_seconds:g}"]
    if found.kernels != "fused":
        said += ["--kernels", found.kernels]
    variables = {} if found.budget == BUDGET else {"BUDGET": f"{found.budget:g}"}
    return Options(
        device=device,
        smoke=found.smoke,
        parts=parts,
        budget_s=60 * found.budget,
        threads=found.threads,
        resume=found.resume,
        output=found.output or (SMOKE_OUTPUT if found.smoke else OUTPUT),
        partial=found.partial,
        steady_s=found.steady_seconds,
        kernels=found.kernels,
        command=make_command("bench-gpu", variables, said),
    )
