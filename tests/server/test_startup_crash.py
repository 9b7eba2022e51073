"""tritonserver's own crash at startup, which is rare, simulated in front of a real server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from triton_local import command
from triton_local.errors import StartFailedError
from triton_local.server import LocalTriton

MESSAGE = "terminate called after throwing an instance of 'boost::interprocess::lock_exception'"

# Counts its starts; the first ones crash as tritonserver does, the next one is tritonserver.
CRASHING = """#!/bin/bash
echo >>{starts}
if [ "$(wc -l <{starts})" -le {crashes} ]; then
  echo "{message}" >&2
  kill -ABRT $$
fi
exec {tritonserver} "$@"
"""


def _crash(monkeypatch: pytest.MonkeyPatch, folder: Path, crashes: int) -> Path:
    """Replace tritonserver by a program that crashes; return the file in which it counts its starts."""
    starts, program = folder / "starts", folder / "tritonserver"

    real: Callable[..., Sequence[str]] = command.server_arguments

    def crashing(*given: object) -> Sequence[str]:
        tritonserver, *arguments = real(*given)
        program.write_text(CRASHING.format(starts=starts, crashes=crashes, message=MESSAGE, tritonserver=tritonserver))
        program.chmod(0o755)
        return [str(program), *arguments]

    monkeypatch.setattr("triton_local.server.server_arguments", crashing)
    return starts


def test_a_crash_at_startup_is_retried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    starts = _crash(monkeypatch, tmp_path, crashes=1)
    with LocalTriton() as started:
        first = started.log_text().splitlines()[0]
    assert len(starts.read_text().splitlines()) == 2
    assert first == (
        "tritonserver ended with code 134 in its own start, before the model ran (its issue 8882); starting it again"
    )


def test_a_start_that_always_crashes_is_tried_three_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    starts = _crash(monkeypatch, tmp_path, crashes=1000)
    with pytest.raises(StartFailedError, match=r"ended with code 134 before it was ready: (?s:.*)lock_exception"):
        LocalTriton().start()
    assert len(starts.read_text().splitlines()) == 3
