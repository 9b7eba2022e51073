"""The command line of a GPU run, and how much of everything is measured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from perf.checkpoint import LLAMA_2_7B, Shape
from perf.command import CORES, count, make_command, positive
from perf.results_file import PARTIAL

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

    batches, exact_s: of the token comparison, whichever ends first. logit_rows, logit_steps: of the logit comparison.
    texts: rows of held-out text for the quality, each of `context` tokens. prompt, output: tokens of a wave's rows.
    decode_rows, graph_rows, product_rows: row counts, one measurement each, the aims' first in case time runs out.
    slots, max_model_len: of the engine whose memory is compared with the plan, for `steps` steps or `steady_s` seconds.
    scarce_rows: rows whose prompts share a prefill pass. scarce_mib: their allowance above the engine's memory, less
    than they need; None for a model that is too small for a cap: a hook refuses its passes.
    """

    shape: Shape
    batches: int
    exact_s: float
    logit_rows: int
    logit_steps: int
    texts: int
    context: int
    prompt: int
    output: int
    decode_rows: tuple[int, ...]
    graph_rows: tuple[int, ...]
    product_rows: tuple[int, ...]
    product_s: float
    rates_s: float
    slots: int
    max_model_len: int
    steps: int
    steady_s: float
    scarce_rows: int
    scarce_mib: int | None


FULL = Amount(
    shape=LLAMA_2_7B,
    batches=200, exact_s=16.0, logit_rows=16, logit_steps=48, texts=40, context=512,
    prompt=100, output=200, decode_rows=(32, 1, 64, 16, 8), graph_rows=(32, 1, 64),
    product_rows=(1, 8, 16, 32, 64, 512), product_s=0.1, rates_s=0.4,
    slots=32, max_model_len=1024, steps=10_000, steady_s=12.0, scarce_rows=32, scarce_mib=256,
)  # fmt: skip

SMOKE = Amount(
    shape=TINY,
    batches=2, exact_s=5.0, logit_rows=3, logit_steps=3, texts=2, context=64,
    prompt=10, output=4, decode_rows=(2, 1), graph_rows=(2,),
    product_rows=(1, 8), product_s=0.001, rates_s=0.001,
    slots=4, max_model_len=128, steps=20, steady_s=2.0, scarce_rows=4, scarce_mib=None,
)  # fmt: skip
"""Everything once, on a tiny model."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; a value out of bounds ends the program with one line.

    Adds to the options: `device` as a torch.device, `amount`, `only` in the order of PARTS, `output` with its default,
    and `command`, which repeats the run.
    """
    parser = argparse.ArgumentParser(prog="make bench-gpu", description=__doc__)
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    add("--smoke", action="store_true", help="everything once, on a tiny model: does the program work?")
    add("--only", nargs="+", choices=PARTS, default=list(DEFAULT), help="default: all but tiles")
    add("--budget", type=positive, default=BUDGET, metavar="MINUTES", help=f"for all of it (default {BUDGET})")
    add("--threads", type=count, default=CORES, metavar="N", help=f"on a CPU (default {CORES})")
    add("--steady-seconds", type=positive, metavar="S", help=f"of full load in each precision, {FULL.steps:,} steps "
        f"at most (default {FULL.steady_s:g})")  # fmt: skip
    add("--kernels", choices=("stock", "fused"), default="fused", help="stock: if a fused kernel breaks the device")
    add("--resume", action="store_true", help="measure only what the output file doesn't contain")
    add("--output", type=Path, metavar="FILE", help=f"default {OUTPUT}, or with --smoke {SMOKE_OUTPUT}")
    add("--partial", type=Path, default=PARTIAL, metavar="FOLDER", help="for the file written during the run")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but PyTorch sees no GPU")
    cuda = options.device != "cpu" and torch.cuda.is_available()
    if not cuda and not options.smoke:
        cpu = "on a CPU there is only --smoke: a model of this size would take hours"
        parser.error(cpu if options.device == "cpu" else "PyTorch sees no GPU; --smoke tries the program out on a CPU")
    options.device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    options.amount = SMOKE if options.smoke else FULL
    if options.steady_seconds is not None:
        options.amount = replace(options.amount, steady_s=options.steady_seconds)
    options.only = tuple(part for part in PARTS if part in options.only)
    options.output = options.output or (SMOKE_OUTPUT if options.smoke else OUTPUT)
    options.command = _command(options)
    return options


def _command(options: argparse.Namespace) -> str:
    """Return the command that repeats the run."""
    words = ["--smoke"] if options.smoke else []
    if options.only != DEFAULT:
        words += ["--only", *options.only]
    if options.steady_seconds is not None:
        words += ["--steady-seconds", f"{options.steady_seconds:g}"]
    if options.kernels != "fused":
        words += ["--kernels", options.kernels]
    variables = {} if options.budget == BUDGET else {"BUDGET": f"{options.budget:g}"}
    return make_command("bench-gpu", variables, words)
