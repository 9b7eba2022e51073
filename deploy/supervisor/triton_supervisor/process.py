"""tritonserver as a child, and what it leaves behind: started, reaped, killed.

- The supervisor is killed: the kernel kills the server (PR_SET_PDEATHSIG).
- The server ends, in whatever way: children it left behind fall to the supervisor (a subreaper), which kills them.

Knows nothing about Triton, and about signals only that its child must not inherit what its caller has blocked.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from triton_supervisor.process_table import children

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.25
_KILLED_MUST_END_S = 10.0
_NOT_RUN = 127
"""Exit code of a command that can't be run, as shells have it."""


class ServerProcess:
    """A child that was started; `pid` is its process id."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def exit_code(self) -> int | None:
        """Collect every child that has ended; return the server's code once it is among them, 128 + N for signal N."""
        if self._code is None:
            for pid, status in _ended_children():
                if pid == self.pid:
                    code = os.waitstatus_to_exitcode(status)
                    self._code = code if code >= 0 else 128 - code
        return self._code

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # Once it is reaped, its number may be another process's.
        if self.exit_code() is None:
            os.kill(self.pid, number)


def adopt_orphans() -> None:
    """Become the parent of whatever descendants lose theirs, so that they can be found and killed."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def start_server(
    arguments: Sequence[str], say: Callable[[str], None], environment: Mapping[str, str] | None = None
) -> ServerProcess:
    """Run a command, found on PATH, that is killed when this process ends. environment: None is this one's own.

    It has a process group of its own. Must be called before there are threads. A command that can't be run is a child
    that says why and ends with 127.
    """
    supervisor = os.getpid()
    pid = os.fork()
    if pid:
        return ServerProcess(pid)
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it died before the kernel was told
            os._exit(1)
        # Or Ctrl-C at its terminal (`docker run -it`) would end it, and the model, without the drain.
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # SIGPIPE stays ignored, as Python set it: a reader of the log who leaves must not cut the drain short.
        os.execvpe(arguments[0], list(arguments), dict(os.environ if environment is None else environment))
    except OSError as error:
        say(f"{arguments[0]} can't be run: {error.strerror}")
    finally:
        os._exit(_NOT_RUN)


def kill_children() -> None:
    """Kill what the server left behind, generation after generation: a killed child's children become ours.

    SIGCHLD must be blocked.
    """
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
