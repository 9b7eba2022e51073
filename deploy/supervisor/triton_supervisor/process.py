"""tritonserver as a child process: started, reaped, killed with its descendants.

- The supervisor is killed: the kernel kills the server (PR_SET_PDEATHSIG).
- The server ends: its orphans become children of the supervisor (a subreaper), which kills them.
- The server doesn't end in order: its shared memory stays (shared_memory.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from triton_supervisor.process_table import children

_PR_SET_CHILD_SUBREAPER = 36
_CHILD = Path(__file__).with_name("child.py")
_POLL_S = 0.25
_KILLED_MUST_END_S = 10.0

_BLOCKED = (signal.SIGTERM, signal.SIGINT)


class ServerProcess:
    """A child process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def exit_code(self) -> int | None:
        """Reap the children that have ended; return the server's exit code once it has, 128 + N for signal N."""
        if self._code is None:
            for pid, status in _ended_children():
                if pid == self.pid:
                    code = os.waitstatus_to_exitcode(status)
                    self._code = code if code >= 0 else 128 - code
        return self._code

    def terminate(self) -> None:
        """Send SIGINT, which tritonserver takes as SIGTERM, unless it has ended."""
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # Once it is reaped, its pid may be another process's.
        if self.exit_code() is None:
            os.kill(self.pid, number)


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs, so that they can be found and killed."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def start_server(arguments: Sequence[str], name: str, environment: Mapping[str, str]) -> ServerProcess:
    """Start a command, found on this process's PATH, that is killed when this process ends.

    It has a process group of its own: otherwise Ctrl-C at its terminal (`docker run -it`) would end it, and the model,
    without a drain. So would a SIGTERM to its control group, as systemd sends: it is blocked, and SIGINT does the same.
    Its descendants inherit that, so that they survive the signal, too: a model ends a process of its own by SIGKILL.
    A command that can't be run is a child that prints the reason, behind `name`, and ends with 127.
    Call it in the main thread: the kernel kills the server when the thread that started it ends.
    """
    # Not os.fork: a server that is started again is started beside threads. The new process prepares itself.
    command = [sys.executable, "-I", "-S", str(_CHILD), str(os.getpid()), name, *arguments]
    return ServerProcess(os.posix_spawn(sys.executable, command, environment, setpgroup=0, setsigmask=_BLOCKED))


def kill_children() -> None:
    """Kill all children, and theirs, which are adopted in turn. SIGCHLD must be blocked."""
    deadline = time.monotonic() + _KILLED_MUST_END_S
    while (left := children(os.getpid())) and time.monotonic() < deadline:
        for child in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        signal.sigtimedwait((signal.SIGCHLD,), _POLL_S)
        for _ in _ended_children():
            pass


def _ended_children() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
