"""Imports point one way: model.py → scheduler → engine → its parts → settings and requests."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

VERSION = Path(__file__).resolve().parents[2] / "model_repository" / "llama" / "1"
PACKAGE = VERSION / "llama_engine"
MODULES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.stem != "__init__"
}

PACKAGES = {"llama_engine", *(f"llama_engine.{folder.name}" for folder in PACKAGE.iterdir() if folder.is_dir())}

# The six packages of the server, by the names they are imported by.
ALLOWED = {"torch", "transformers", "bitsandbytes", "accelerate", "numpy", "tritonclient"}

# The Triton language comes with PyTorch's CUDA builds only.
KERNELS = {"kernels.int8_product", "kernels.decode_attention"}

# From the bottom up: a module imports only from the layers above it in this list.
LAYERS = [
    {"errors", "libraries", "sampling.philox", "text.partial_match", "observability.metrics", "triton.config"},
    {"kernels.reference", "kernels.arrival_counters"},
    KERNELS,
    {"kernels.selection"},
    {"model.int8_linear"},
    {"settings", "sampling.logits_processors", "text.stop_checker", "text.tokenizer", "api.defaults",
     "model.kv_cache", "model.model_info", "model.manifest", "model.checkpoint_files", "triton.metrics"},
    {"text.bad_words", "api.request_parser", "model.loader"},
    {"sequence", "model.model_runner"},
    {"isolation", "sampling.sampler", "response_dispatcher", "observability.log"},
    {"slot_batch"},
    {"cuda_graphs"},
    {"model.memory_plan", "prefill"},
    {"engine"},
    {"observability.stats", "observability.health"},
    {"scheduler"},
    {"observability.readiness"},
    {"triton.requests"},
]  # fmt: skip

# What imports Triton's backend API.
TRITON = {"model.py", "llama_engine/triton/requests.py"}


def _imports(path: Path) -> Iterator[str]:
    """Yield the full name of every import of a file, also inside functions."""
    yield from _names(path, ast.walk(ast.parse(path.read_text())))


def _names(path: Path, nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the full names that these nodes of a file import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}, line {node.lineno}: imports must be absolute"
            # `from llama_engine.model import kv_cache` is an import of llama_engine.model.kv_cache.
            yield from (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module in PACKAGES
                else [str(node.module)]
            )


def _inside(path: Path) -> set[str]:
    return {name.removeprefix("llama_engine.") for name in _imports(path) if name.split(".")[0] == "llama_engine"}


def test_only_model_py_and_triton_requests_import_tritons_backend_api() -> None:
    knowing = {
        path.relative_to(VERSION).as_posix()
        for path in VERSION.rglob("*.py")
        if "triton_python_backend_utils" in _imports(path)
    }
    assert knowing == TRITON


def test_the_version_folder_has_model_py_and_the_package_only() -> None:
    entries = {path.name for path in VERSION.iterdir()} - {"__pycache__"}
    assert entries == {"model.py", "llama_engine"}


def test_every_module_is_in_one_layer() -> None:
    assert set().union(*LAYERS) == set(MODULES)
    assert sum(map(len, LAYERS)) == len(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_from_lower_layers(name: str) -> None:
    own = next(index for index, layer in enumerate(LAYERS) if name in layer)
    assert _inside(MODULES[name]) <= set().union(*LAYERS[:own])


def test_only_libraries_imports_bitsandbytes_directly() -> None:
    direct = [name for name, path in MODULES.items() if any(x.split(".")[0] == "bitsandbytes" for x in _imports(path))]
    assert direct == ["libraries"]


def test_model_py_imports_libraries_before_the_rest_of_the_package() -> None:
    assert next(name for name in _imports(VERSION / "model.py") if "llama_engine" in name) == "llama_engine.libraries"


def test_the_package_init_imports_nothing() -> None:
    assert set(_imports(PACKAGE / "__init__.py")) <= {"__future__"}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_the_servers_six_packages(name: str) -> None:
    outside = {imported.split(".")[0] for imported in _imports(MODULES[name])} - {"llama_engine"}
    own = {"triton"} if name in KERNELS else set()
    if f"llama_engine/{name.replace('.', '/')}.py" in TRITON:
        own = {"triton_python_backend_utils"}
    assert outside - set(sys.stdlib_module_names) <= ALLOWED | own


@pytest.mark.parametrize("name", sorted(set(MODULES) - KERNELS))
def test_a_module_imports_without_the_triton_language(name: str) -> None:
    at_once = set(_names(MODULES[name], ast.parse(MODULES[name].read_text()).body))
    assert not {f"llama_engine.{kernel}" for kernel in KERNELS} & at_once
