"""What the unit tests share: the embedded checkpoint, loaded once in each precision."""

import os

import pytest
import torch
from llama_engine.model.loader import Checkpoint
from llama_engine.text.tokenizer import Tokenizer
from unit.engines import load

# The embedded model is so small that two threads are no faster, and CI runs something else on the second core. In the
# environment for the programs that tests start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def fp32() -> Checkpoint:
    return load("none")


@pytest.fixture(scope="session")
def int8() -> Checkpoint:
    return load("int8")


@pytest.fixture(scope="session")
def codec(fp32: Checkpoint) -> Tokenizer:
    """The embedded checkpoint's tokenizer."""
    return fp32.codec
