"""Run a command to its end within a time limit, and show what it said when it fails. Knows nothing about Docker."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class CommandFailedError(Exception):
    """A command ended with another exit code than 0, or not in time; the message holds all of its output."""


def run(
    command: Sequence[str | Path],
    *,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run `command` for at most `timeout` seconds; its standard output and error come back as text.

    Raises CommandFailedError when it doesn't end in time and, with `check`, when it doesn't end with 0.
    """
    words = [str(word) for word in command]
    # A session of its own: the docker command line runs plugins as children, which must not outlive the time limit.
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
            raise CommandFailedError(_account(words, f"not done after {timeout:g} s", output, errors)) from None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if check and process.returncode != 0:
        raise CommandFailedError(_account(words, f"exit code {process.returncode}", output, errors))
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def _account(words: Sequence[str], what: str, output: str, errors: str) -> str:
    return f"{what}: {shlex.join(words)}\n--- stdout\n{output}\n--- stderr\n{errors}"
