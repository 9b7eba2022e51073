"""tritonserver's own crash at its start, which is rare and over by the next one: made up, a real server behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from triton_local import command
from triton_local.errors import StartFailedError
from triton_local.server import LocalTriton

SAYS = "terminate called after throwing an instance of 'boost::interprocess::lock_exception'"

# Counts its starts; crashes so many times as tritonserver does, then becomes tritonserver.
CRASHING = """#!/bin/bash
echo >>{starts}
if [ "$(wc -l <{starts})" -le {crashes} ]; then
  echo "{says}" >&2
  kill -ABRT $$
fi
exec {tritonserver} "$@"
"""


def _crash(monkeypatch: pytest.MonkeyPatch, folder: Path, crashes: int) -> Path:
    """Put a program that crashes in tritonserver's place; return the file in which it counts its starts."""
    starts, program = folder / "starts", folder / "tritonserver"

    real: Callable[..., Sequence[str]] = command.server_arguments

    def crashing(*given: object) -> Sequence[str]:
        tritonserver, *arguments = real(*given)
        program.write_text(CRASHING.format(starts=starts, crashes=crashes, says=SAYS, tritonserver=tritonserver))
        program.chmod(0o755)
        return [str(program), *arguments]

    monkeypatch.setattr("triton_local.server.server_arguments", crashing)
    return starts


def test_a_crash_at_the_start_ends_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    starts = _crash(monkeypatch, tmp_path, crashes=1)
    with LocalTriton() as started:
        first = started.log_text().splitlines()[0]
    assert len(starts.read_text().splitlines()) == 2
    assert first == (
        "tritonserver ended with code 134 in its own start, before the model ran (its issue 8882); starting it again"
    )


def test_a_start_that_always_crashes_is_tried_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    starts = _crash(monkeypatch, tmp_path, crashes=1000)
    with pytest.raises(StartFailedError, match=r"ended with code 134 before it was ready: (?s:.*)lock_exception"):
        LocalTriton().start()
    assert len(starts.read_text().splitlines()) == 3
