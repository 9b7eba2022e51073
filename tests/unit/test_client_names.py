"""The names of the client library, which are imported when they are asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import triton_llama


@pytest.mark.parametrize("name", triton_llama.__all__)
def test_a_public_name_is_missing_or_another_ones(name: str) -> None:
    assert getattr(triton_llama, name).__name__ == name
    assert name in dir(triton_llama)


@pytest.mark.parametrize("name", ["Completions", "import_module_", "_nothing"])
def test_a_name_that_is_none_is_found(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'triton_llama' has no attribute {name!r}"):
        getattr(triton_llama, name)


def test_the_package_costs_its_heavy_imports_before_they_are_needed() -> None:
    program = "import sys, triton_llama; print('tritonclient' in sys.modules); from triton_llama import LlamaClient"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=True)
    assert said.stdout.split() == ["False"]
