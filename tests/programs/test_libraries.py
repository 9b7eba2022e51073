"""`llama_engine.libraries` in a process of its own, because an import happens once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENGINE = Path(__file__).resolve().parents[2] / "model_repository" / "llama" / "1"
PROGRAM = """
import logging, sys
import llama_engine.libraries
import gc, torch
print(gc.isenabled(), torch.compile.__module__, "torch._inductor.compile_fx" in sys.modules)
from llama_engine.libraries import Linear4bit
layer = Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
print(bool(torch.isfinite(layer(torch.ones(1, 64))).all()))
"""
LOAD = """
import sys
import llama_engine.libraries
import torch
from llama_engine.engine import Engine
from llama_engine.model.loader import load_checkpoint
from llama_engine.settings import Settings
settings = Settings(quantization=sys.argv[1])
Engine(load_checkpoint(settings, torch.device("cpu")), settings, 1).warm_up()
for module in ("transformers.models.llama.modeling_llama", "transformers.models", "torch._dynamo", "accelerate"):
    print(module in sys.modules)
"""


def test_importing_the_libraries_prints_nothing_leaves_torch_as_it_is_and_what_bitsandbytes_compiles_works() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ENGINE, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == ["True torch False", "True"]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("given", "spin_count"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
)
def test_openmp_threads_spin_briefly_unless_the_environment_says_how_long(
    given: dict[str, str], spin_count: str
) -> None:
    command = [sys.executable, "-c", "import os, llama_engine.libraries; print(os.environ.get('GOMP_SPINCOUNT'))"]
    # libgomp prints what it took from the environment.
    environment = {**os.environ, **given, "OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run(command, cwd=ENGINE, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert f"GOMP_SPINCOUNT = '{spin_count}'" in done.stderr
    assert done.stdout.strip() == str(given.get("GOMP_SPINCOUNT")), "no child process inherits it"


@pytest.mark.parametrize(("quantization", "imported"), [("int8", False), ("none", False), ("nf4", True)])
def test_only_checkpoints_that_need_them_import_the_modelling_code_of_transformers_and_the_compiler_of_torch(
    quantization: str, imported: bool
) -> None:
    command = [sys.executable, "-c", LOAD, quantization]
    done = subprocess.run(command, cwd=ENGINE, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == 4 * [str(imported)]
