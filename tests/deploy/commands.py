"""Run a command within a time limit; its output is in the error if it fails."""

from __future__ import annotations

import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class CommandFailedError(Exception):
    """A command failed or timed out; the message holds all of its output."""


def run(
    command: Sequence[str | Path],
    *,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run `command` for at most `timeout` seconds and return its output as text.

    Raises CommandFailedError on a timeout and, with `check`, on an exit code other than 0.
    """
    # The program `timeout` ends a whole group: docker's plugins are its children, and must not outlive the limit.
    words = ["timeout", "--signal=KILL", str(timeout), *map(str, command)]
    ended = subprocess.run(
        words,
        env=environment,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    timed_out = ended.returncode == -signal.SIGKILL
    if timed_out or (check and ended.returncode != 0):
        failure = f"timed out after {timeout:g} s" if timed_out else f"exit code {ended.returncode}"
        output = f"--- stdout\n{ended.stdout}\n--- stderr\n{ended.stderr}"
        raise CommandFailedError(f"{failure}: {shlex.join(words)}\n{output}")
    return ended
