"""Run a command within a time limit; its output is in the error if it fails."""

from __future__ import annotations

import os
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
    words = [str(word) for word in command]
    # A session of its own: docker runs plugins as children, which must not outlive the time limit.
    with subprocess.Popen(
        words,
        env=environment,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            raise CommandFailedError(_report(words, f"timed out after {timeout:g} s", output, errors)) from None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if check and process.returncode != 0:
        raise CommandFailedError(_report(words, f"exit code {process.returncode}", output, errors))
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def _report(words: Sequence[str], failure: str, output: str, errors: str) -> str:
    return f"{failure}: {shlex.join(words)}\n--- stdout\n{output}\n--- stderr\n{errors}"
