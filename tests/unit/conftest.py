"""What the unit tests share: the embedded checkpoint, loaded once in each precision."""

import pytest
from llama_engine.checkpoint import Checkpoint
from llama_engine.text import TextCodec
from unit.engines import load
from unit.notes import Note


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


_NOTES = pytest.StashKey[list[str]]()


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    """Take a line for the end of the run."""
    return request.config.stash.setdefault(_NOTES, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    notes = config.stash.get(_NOTES, [])
    if notes:
        terminalreporter.section("counted")
        terminalreporter.write("".join(f"{line}\n" for line in notes))
