"""What the unit tests share: the embedded checkpoint, loaded once in each precision."""

import pytest
from llama_engine.checkpoint import Checkpoint
from llama_engine.text import TextCodec
from unit.engines import load


@pytest.fixture(scope="session")
def fp32() -> Checkpoint:
    return load("none")


@pytest.fixture(scope="session")
def int8() -> Checkpoint:
    return load("int8")


@pytest.fixture(scope="session")
def codec(fp32: Checkpoint) -> TextCodec:
    """The embedded checkpoint's tokenizer."""
    return fp32.codec
