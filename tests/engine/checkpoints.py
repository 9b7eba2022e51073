"""Fixtures of the embedded checkpoint, loaded once in each precision; a room's conftest imports the ones it needs."""

import pytest
from engine.engines import load
from llama_engine.model.loader import Checkpoint
from llama_engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def fp32() -> Checkpoint:
    return load("none")


@pytest.fixture(scope="session")
def int8() -> Checkpoint:
    return load("int8")


@pytest.fixture(scope="session")
def tokenizer(fp32: Checkpoint) -> Tokenizer:
    """The embedded checkpoint's tokenizer."""
    return fp32.tokenizer
