"""What the engine imports, in processes of their own; pyproject's contracts say which part may import which."""

import os
import subprocess
import sys
from pathlib import Path

import grimp
import pytest
from engine.configs import MODEL

ENGINE = MODEL / "1"
SERVER = {"torch", "transformers", "bitsandbytes", "numpy", "huggingface_hub", "regex"}
"""The server's packages by the names they are imported by; huggingface_hub and regex come with transformers."""
OPTIONAL = {"llguidance", "gguf", "msgspec", "opentelemetry", "zmq"}
BACKEND = "triton_python_backend_utils"
IMPORT = f"""
import gc, sys, types
sys.modules |= {{"{BACKEND}": types.ModuleType("{BACKEND}")}} | dict.fromkeys({OPTIONAL | {"triton"}})
import model
"""
IMPORT_AND_LOAD = f"""{IMPORT}
import torch
print(gc.isenabled())
from llama_engine.engine.engine import Engine
from llama_engine.model.loader import load_checkpoint
from llama_engine.settings import Settings
for quantization in ("int8", "none"):
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


def test_the_engine_imports_only_the_servers_packages() -> None:
    graph = grimp.build_graph("llama_engine", include_external_packages=True, cache_dir=None)
    outside = {name for name in graph.modules if not name.startswith("llama_engine")} - sys.stdlib_module_names
    assert outside == SERVER | OPTIONAL | {BACKEND}


@pytest.mark.long
def test_int8_and_floats_need_neither_modelling_code_nor_optional_packages() -> None:
    done = _run(IMPORT_AND_LOAD)
    assert [line.split() for line in done.stdout.splitlines()] == [["True"], *[["False"] * 3] * 2]
    # As it is on a machine without a C++ compiler.
    assert [line for line in done.stderr.splitlines() if "no CPU kernels" not in line] == []


@pytest.mark.parametrize(
    ("variables", "spin_count"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")],
)
def test_openmp_threads_spin_as_long_as_the_environment_says(
    tmp_path: Path, variables: dict[str, str], spin_count: str
) -> None:
    # In place of torch, with which libgomp reads the variable.
    printing = "import os; print(os.environ.get('GOMP_SPINCOUNT'))"
    (tmp_path / "torch.py").write_text(printing)
    for module in ("", "configuration_utils", "tokenization_utils_tokenizers", "generation"):
        path = tmp_path / "transformers" / module / "__init__.py"
        path.parent.mkdir(parents=True)
        path.touch()
    done = _run(f"import llama_engine.libraries; {printing}", **variables, PYTHONPATH=str(tmp_path))
    assert done.stdout.split() == [spin_count, str(variables.get("GOMP_SPINCOUNT"))], "no child process inherits it"


@pytest.mark.long
def test_libgomp_takes_the_spin_count_of_the_model() -> None:
    # It prints its settings as torch loads it, which model.py must not do before.
    done = _run(IMPORT, OMP_DISPLAY_ENV="verbose")
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr
