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
print(gc.isenabled(), torch.compile.__module__, "torch._inductor.compile_fx" in sys.modules)
from llama_engine.engine import Engine
from llama_engine.model.loader import load_checkpoint
from llama_engine.settings import Settings
for quantization in ("int8", "none", "nf4"):
    settings = Settings(quantization=quantization)
    Engine(load_checkpoint(settings, torch.device("cpu")), settings, 1).warm_up()
    needed = ("transformers.models.llama.modeling_llama", "transformers.models", "torch._dynamo", "accelerate")
    print(*(module in sys.modules for module in needed))
"""


def _run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    given = {**os.environ, **environment}
    return subprocess.run(command, cwd=ENGINE, env=given, capture_output=True, text=True, check=True, timeout=120)


def test_the_libraries_print_nothing_and_leave_torch_as_it_is_and_only_nf4_needs_modelling_code_and_compiler() -> None:
    done = _run(IMPORT_AND_LOAD)
    int8 = none = [str(False)] * 4
    nf4 = [str(True)] * 4
    assert [line.split() for line in done.stdout.splitlines()] == [["True", "torch", "False"], int8, none, nf4]
    # As it is on a machine without a C++ compiler.
    assert [line for line in done.stderr.splitlines() if "the CPU kernels aren't built" not in line] == []


@pytest.mark.parametrize(
    ("given", "spin_count"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
)
def test_openmp_threads_spin_briefly_unless_the_environment_says_how_long(
    given: dict[str, str], spin_count: str
) -> None:
    # libgomp prints what it took from the environment.
    printing = "import os, llama_engine.libraries; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = _run(printing, **given, OMP_DISPLAY_ENV="verbose")
    assert f"GOMP_SPINCOUNT = '{spin_count}'" in done.stderr
    assert done.stdout.strip() == str(given.get("GOMP_SPINCOUNT")), "no child process inherits it"
