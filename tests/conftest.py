"""What all tests share: lines for the end of the run, and an end that stops servers."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial

import pytest
from notes import Note

# What a test has started ends with its fixtures, after SIGTERM too.
signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    """Take a line for the end of the run."""
    return partial(record_property, "note")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    notes = [line for report in reports for name, line in report.user_properties if name == "note"]
    if notes:
        terminalreporter.section("counted")
        terminalreporter.write("".join(f"{line}\n" for line in notes))
