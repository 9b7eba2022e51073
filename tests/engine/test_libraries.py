"""What the engine imports, in processes of their own; pyproject's contracts say which part may import which."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import grimp
import pytest
from engine.configs import MODEL

ENGINE = MODEL / "1"
SERVER = {"torch", "transformers", "bitsandbytes", "numpy", "huggingface_hub", "regex"}
"""The server's packages by the names they are imported by; huggingface_hub and regex come with transformers."""
OPTIONAL = {"llguidance", "gguf", "msgspec", "opentelemetry", "zmq"}
BACKEND = "triton_python_backend_utils"
IMPORT_EVERY_MODULE = f"""
import importlib, pkgutil, sys, types
sys.modules |= {{"{BACKEND}": types.ModuleType("{BACKEND}")}} | dict.fromkeys({OPTIONAL | {"triton"}})
import llama_engine
for module in pkgutil.walk_packages(llama_engine.__path__, "llama_engine."):
    # Imported with the first guide, and with the setting traces.
    if not module.name.endswith((".grammar.translation", ".grammar.matcher", ".observability.traces")):
        importlib.import_module(module.name)
"""
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


def test_the_version_folder_has_the_model_alone() -> None:
    assert {path.name for path in ENGINE.iterdir()} - {"__pycache__"} == {"model.py", "llama_engine"}


def test_model_py_imports_the_libraries_first() -> None:
    program = (ENGINE / "model.py").read_text()
    imports = re.findall(r"^(?:import|from) (llama_engine\S*|torch|transformers)", program, re.M)
    assert imports[0] == "llama_engine.libraries"


def test_the_engine_imports_only_the_servers_packages() -> None:
    graph = grimp.build_graph("llama_engine", include_external_packages=True, cache_dir=None)
    outside = {name for name in graph.modules if not name.startswith("llama_engine")} - sys.stdlib_module_names
    assert outside == SERVER | OPTIONAL | {BACKEND}


def test_every_module_imports_without_optional_packages() -> None:
    _run(IMPORT_EVERY_MODULE)


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
