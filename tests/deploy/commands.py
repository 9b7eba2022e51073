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
    words, failure = [str(word) for word in command], ""
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
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            failure = f"timed out after {timeout:g} s"
            output, errors = process.communicate()
    if check and process.returncode != 0:
        failure = failure or f"exit code {process.returncode}"
    if failure:
        raise CommandFailedError(f"{failure}: {shlex.join(words)}\n--- stdout\n{output}\n--- stderr\n{errors}")
    return subprocess.CompletedProcess(words, process.returncode, output, errors)
