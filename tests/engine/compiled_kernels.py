"""The compiled CPU kernels are optional: a test that needs them is skipped where none is built."""

from __future__ import annotations

import pytest
from llama_engine.kernels.cpu.build import object_path
from llama_engine.kernels.cpu.instruction_sets import allowed_instruction_sets


def needs_compiled_kernels(instruction_set: str | None = None) -> None:
    """Skip the test unless an instruction set's kernels are built and this CPU runs them; None is any of them."""
    wanted = [name for name in allowed_instruction_sets() if instruction_set in (None, name)]
    if not any(object_path(name).exists() for name in wanted):
        pytest.skip("no kernels are compiled: no C++ compiler, or no AVX2")
