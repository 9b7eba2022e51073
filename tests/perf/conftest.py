from __future__ import annotations

import pytest
from engine.engines import load
from llama_engine.model.loader import Checkpoint


@pytest.fixture(scope="package")
def fp32() -> Checkpoint:
    return load("none")
