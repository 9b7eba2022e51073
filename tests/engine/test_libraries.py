"""`llama_engine.libraries` in a process of its own, because an import happens once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENGINE = Path(__file__).resolve().parents[2] / "model_repository" / "llama" / "1"
IMPORT_AND_LOAD = """
import gc, sys
import llama_engine.libraries
import torch
print(gc.isenabled())
from llama_engine.engine.engine import Engine
from llama_engine.model.loader import load_checkpoint
from llama_engine.settings import Settings
for quantization in ("int8", "none", "nf4"):
    settings = Settings(model="../../../models/pydoc-llama", quantization=quantization)
    Engine(load_checkpoint(settings, torch.device("cpu")), settings, 1).warm_up()
    needed = ("transformers.models.llama.modeling_llama", "bitsandbytes", "torch._dynamo")
    print(*(module in sys.modules for module in needed))
"""


def _run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, variables = [sys.executable, "-c", program], {**os.environ, **environment}
    return subprocess.run(command, cwd=ENGINE, env=variables, capture_output=True, text=True, check=True, timeout=120)


@pytest.mark.long
def test_only_nf4_imports_modelling_code() -> None:
    done = _run(IMPORT_AND_LOAD)
    int8 = none = [str(False)] * 3
    nf4 = [str(True)] * 3
    assert [line.split() for line in done.stdout.splitlines()] == [["True"], int8, none, nf4]
    # As it is on a machine without a C++ compiler.
    assert [line for line in done.stderr.splitlines() if "no CPU kernels" not in line] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("variables", "spin_count"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
)
def test_openmp_threads_spin_as_long_as_the_environment_says(variables: dict[str, str], spin_count: str) -> None:
    # libgomp prints what it took from the environment.
    printing = "import os, llama_engine.libraries; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = _run(printing, **variables, OMP_DISPLAY_ENV="verbose")
    assert f"GOMP_SPINCOUNT = '{spin_count}'" in done.stderr
    assert done.stdout.strip() == str(variables.get("GOMP_SPINCOUNT")), "no child process inherits it"
