"""What every room of the tests shares: lines for the end of the run, and an end that stops servers."""

from __future__ import annotations

import signal

import pytest
from notes import Note

# What a test has started ends with its fixtures, after SIGTERM too.
signal.signal(signal.SIGTERM, signal.default_int_handler)

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
