"""`llama_engine.libraries` in a process of its own, because an import happens once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "model_repository" / "llama" / "1"
PROGRAM = """
import logging, sys
import llama_engine.libraries
import gc, torch
print(gc.isenabled(), torch.compile.__module__, "torch._inductor.compile_fx" in sys.modules)
{more}
"""


def _run(more: str = "") -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(more=more)],
        cwd=ENGINE, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return done.stdout, done.stderr


def test_importing_the_libraries_prints_nothing_and_leaves_torch_as_it_is() -> None:
    assert _run() == ("True torch False\n", "")


def test_a_function_that_bitsandbytes_compiles_still_works() -> None:
    out, _ = _run("""
from llama_engine.libraries import Linear4bit
layer = Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
print(bool(torch.isfinite(layer(torch.ones(1, 64))).all()))
""")
    assert out.endswith("True\n")
