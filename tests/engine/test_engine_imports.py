"""What the engine imports from outside; pyproject's import contracts say which of its parts may import which."""

from __future__ import annotations

import re
import subprocess
import sys

import grimp
import pytest
from engine.configs import MODEL

VERSION = MODEL / "1"
SERVER = {"torch", "transformers", "bitsandbytes", "numpy", "huggingface_hub"}
"""The server's packages by the names they are imported by; huggingface_hub comes with transformers."""
OPTIONAL = {"llguidance", "gguf"}
BACKEND = "triton_python_backend_utils"

IMPORT_EVERY_MODULE = f"""
import importlib, pkgutil, sys, types
sys.modules |= {{"{BACKEND}": types.ModuleType("{BACKEND}")}} | dict.fromkeys({OPTIONAL | {"triton"}})
import llama_engine
for module in pkgutil.walk_packages(llama_engine.__path__, "llama_engine."):
    # Imported with the first guide.
    if not module.name.endswith((".grammar.translation", ".grammar.matcher")):
        importlib.import_module(module.name)
"""


def test_the_version_folder_has_the_model_alone() -> None:
    assert {path.name for path in VERSION.iterdir()} - {"__pycache__"} == {"model.py", "llama_engine"}


def test_model_py_imports_the_libraries_first() -> None:
    imports = re.findall(
        r"^(?:import|from) (llama_engine\S*|torch|transformers)", (VERSION / "model.py").read_text(), re.M
    )
    assert imports[0] == "llama_engine.libraries"


def test_the_engine_imports_only_the_servers_packages() -> None:
    graph = grimp.build_graph("llama_engine", include_external_packages=True, cache_dir=None)
    outside = {name for name in graph.modules if not name.startswith("llama_engine")} - sys.stdlib_module_names
    assert outside == SERVER | OPTIONAL | {BACKEND}


@pytest.mark.long
def test_every_module_imports_without_optional_packages() -> None:
    subprocess.run([sys.executable, "-c", IMPORT_EVERY_MODULE], cwd=VERSION, check=True, timeout=120)
