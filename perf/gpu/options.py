"""The command line of a GPU run, and how much of everything is measured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from perf.checkpoint import LLAMA_2_7B, Shape
from perf.command import given, make_command, positive
from perf.results_file import PARTIAL

PARTS = ("environment", "correct", "stock", "capacity", "decode", "graph", "quality", "products", "article")
OUTPUT = Path("perf/results/gpu.json")
SMOKE_OUTPUT = Path(".work/gpu/smoke.json")
"""Not among the results: a smoke run's figures mean nothing."""
BUDGET = 8
"""Minutes."""

TINY = Shape(64, 128, 2, 4, 2, 3072, 512, "float32")


class Amount(NamedTuple):
    """How much is measured; seconds of a single measurement unless noted.

    batches, exact_s: of the token comparison, whichever ends first. logit_rows, logit_steps: of the logit comparison.
    texts: rows of held-out text for the quality, each of `context` tokens. prompt, output: tokens of a wave's rows.
    decode_rows, graph_rows, product_rows: row counts, one measurement each, the aims' first in case time runs out.
    slots, max_model_len: of the engine whose memory is compared with the plan, for `steps` steps or `steady_s` seconds.
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


FULL = Amount(
    shape=LLAMA_2_7B,
    batches=200, exact_s=16.0, logit_rows=16, logit_steps=48, texts=40, context=512,
    prompt=100, output=200, decode_rows=(32, 1, 64, 16, 8), graph_rows=(32, 1, 64),
    product_rows=(1, 8, 16, 32, 64, 512), product_s=0.1, rates_s=0.4,
    slots=32, max_model_len=1024, steps=10_000, steady_s=12.0,
)  # fmt: skip

SMOKE = Amount(
    shape=TINY,
    batches=2, exact_s=5.0, logit_rows=3, logit_steps=3, texts=2, context=64,
    prompt=10, output=4, decode_rows=(2, 1), graph_rows=(2,),
    product_rows=(1, 8), product_s=0.001, rates_s=0.001,
    slots=4, max_model_len=128, steps=20, steady_s=2.0,
)  # fmt: skip
"""Everything once, on a tiny model."""


def parse(arguments: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Parse the command line; a value out of bounds ends the program with one line.

    Adds to the options: `device` as a torch.device, `amount`, `only` in the order of PARTS, `output` with its default,
    and `command`, which repeats the run.
    """
    parser = argparse.ArgumentParser(
        prog="make bench-gpu", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    add("--smoke", action="store_true", help="everything once, on a tiny model: does the program work?")
    add("--only", nargs="+", choices=PARTS, default=[*PARTS], help="default: all of them")
    add("--budget", type=positive, default=BUDGET, metavar="MINUTES", help=f"for all of it (default {BUDGET})")
    add("--kernels", choices=("stock", "fused"), default="fused", help="stock: if a fused kernel breaks the device")
    add("--resume", action="store_true", help="measure only what the output file doesn't contain")
    add("--output", type=Path, metavar="FILE", help=f"default {OUTPUT}, or with --smoke {SMOKE_OUTPUT}")
    add("--partial", type=Path, default=PARTIAL, metavar="FOLDER", help="for the file written during the run")
    options = parser.parse_args(arguments)
    cuda = options.device != "cpu" and torch.cuda.is_available()
    if not cuda and not (options.smoke and options.device != "cuda"):
        parser.error("there is no GPU, or --device cpu: without one there is only --smoke --device cpu")
    budget = {} if options.budget == BUDGET else {"BUDGET": f"{options.budget:g}"}
    options.command = make_command("bench-gpu", budget, given(parser, options, ["smoke", "only", "kernels"]))
    options.device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    options.amount = SMOKE if options.smoke else FULL
    options.only = tuple(part for part in PARTS if part in options.only)
    options.output = options.output or (SMOKE_OUTPUT if options.smoke else OUTPUT)
    return options
