"""Imports point one way: model.py → scheduler → engine → its parts → settings and requests."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from contract.code_blocks import ROOT
from contract.configs import MODEL

TESTS = ROOT / "tests"
VERSION = MODEL / "1"
PACKAGE = VERSION / "llama_engine"
MODULES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.stem != "__init__"
}
PACKAGES = {
    ".".join(("llama_engine", *path.parent.relative_to(PACKAGE).parts)) for path in PACKAGE.rglob("__init__.py")
}

# From the bottom up: none of them imports a later one, directly or through others.
LAYERS = (
    *("errors", "settings", "text.stop_checker", "model.config_bounds", "model.kv_cache", "model.row_blocks"),
    *("model.int8_rows", "model.cpu_runner", "model.formats.linear_format", "model.formats.detection"),
    *("model.checkpoint_headers", "model.description", "api.receipt"),
    *("api.request_parser",),
    *("events", "sequence", "block_manager", "kv_slots", "sampling.sampler", "slot_batch", "decode_step"),
    *("verification", "prefill", "receipt_origin"),
    *("engine",),
    *("cancellation", "scheduler"),
    *("triton.response", "triton.request_decoder"),
)

# The six packages of the server, by the names they are imported by.
SERVER = {"torch", "transformers", "bitsandbytes", "accelerate", "numpy", "tritonclient"}

# It comes with transformers.
TRANSFORMERS = {"huggingface_hub"}

# llguidance is optional, too: imported with the first guide.
GUIDES = {"sampling.guide_grammar", "sampling.guide_matcher"}

# gguf is optional, too: imported for GGUF files.
USES_GGUF = {"model.gguf.blocks", "model.gguf.header", "model.gguf.tensors"}

# Its import takes seconds: only what a checkpoint without it doesn't import.
USES_BITSANDBYTES = {"kernels.gpu.exact_int8", "model.transformers_reader"}

# Triton's backend API.
BACKEND = "triton_python_backend_utils"
USES_BACKEND = {"triton.request_decoder", "triton.response", "triton.tensors"}


def _imports(path: Path, nested: bool = True) -> list[str]:
    """Return the full name of every import of a file, in order. nested: also inside functions."""
    tree = ast.parse(path.read_text())
    nodes: Iterable[ast.AST] = ast.walk(tree) if nested else tree.body
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}, line {node.lineno}: imports must be absolute"
            # `from llama_engine.model import kv_cache` is an import of llama_engine.model.kv_cache.
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
            names += modules if node.module in PACKAGES else [str(node.module)]
    return names


INTERNAL = {
    name: {imported.removeprefix("llama_engine.") for imported in _imports(path)} & {*MODULES}
    for name, path in MODULES.items()
}
"""The modules of the package that each module imports."""


def test_the_version_folder_has_the_model_alone() -> None:
    assert {path.name for path in VERSION.iterdir()} - {"__pycache__"} == {"model.py", "llama_engine"}
    assert set(_imports(PACKAGE / "__init__.py")) <= {"__future__"}


def test_model_py_imports_the_libraries_first() -> None:
    imports = _imports(VERSION / "model.py")
    assert BACKEND in imports
    assert next(name for name in imports if "llama_engine" in name) == "llama_engine.libraries"


def test_no_import_leads_to_a_higher_layer() -> None:
    # Raises CycleError, which names the cycle.
    reached: dict[str, set[str]] = {}
    for name in TopologicalSorter(INTERNAL).static_order():
        reached[name] = INTERNAL[name].union(*(reached[imported] for imported in INTERNAL[name]))
    assert [(name, above) for at, name in enumerate(LAYERS) for above in reached[name] & {*LAYERS[at:]}] == []


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_the_servers_packages(name: str) -> None:
    outside = {imported.split(".")[0] for imported in _imports(MODULES[name])} - {"llama_engine"}
    allowed = SERVER - (set() if name in USES_BITSANDBYTES else {"bitsandbytes"})
    allowed |= TRANSFORMERS
    allowed |= ({BACKEND} if name in USES_BACKEND else set()) | ({"llguidance"} if name in GUIDES else set())
    allowed |= {"gguf"} if name in USES_GGUF else set()
    assert outside - set(sys.stdlib_module_names) <= allowed


@pytest.mark.parametrize("name", sorted(set(MODULES) - GUIDES))
def test_a_module_imports_without_optional_packages(name: str) -> None:
    optional = {"triton", "llguidance", "gguf", *(f"llama_engine.{module}" for module in GUIDES)}
    assert not optional & set(_imports(MODULES[name], nested=False))


def _offenders(folder: Path, forbidden: set[str]) -> list[str]:
    """Return the files of a folder that import one of these packages."""
    files = [path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts]
    return [
        str(path.relative_to(ROOT)) for path in files if {name.split(".")[0] for name in _imports(path)} & forbidden
    ]


def test_perf_does_not_import_tests() -> None:
    assert _offenders(ROOT / "perf", {path.stem for path in TESTS.iterdir()} - {"perf"}) == []


@pytest.mark.parametrize("room", sorted(path.name for path in TESTS.iterdir() if path.is_dir() and path.name != "perf"))
def test_a_room_does_not_import_perf(room: str) -> None:
    assert _offenders(TESTS / room, {"perf"}) == []


def test_deploy_does_not_import_the_client() -> None:
    # The demo is one of its users.
    assert _offenders(ROOT / "deploy", {"triton_llama"}) == ["deploy/local/triton_local/demo.py"]
