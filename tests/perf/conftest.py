"""The embedded checkpoint, as tests/engine loads it, and the servers that tests/end_to_end plans."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from end_to_end.plans import planned
from engine.checkpoints import fp32, tokenizer
from triton_local.server import LocalTriton

__all__ = ["fp32", "tokenizer"]


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTriton]:
    with planned("triton", tmp_path_factory.mktemp("triton")) as server:
        yield server
