"""tritonserver and the model's processes: started, watched, reaped, killed, and their shared memory removed.

- The supervisor is killed: the kernel kills the server (PR_SET_PDEATHSIG).
- The server ends: its orphans become children of the supervisor (a subreaper), which kills them.
- The server doesn't end in order: its regions in /dev/shm stay, and are removed by the prefix of their names.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
STUB = "triton_python_b"
"""triton_python_backend_stub, a model's process; the kernel keeps 15 characters of a name."""

STACK_BYTES = 512 * 2**20
"""More than a body of 2 MiB can take in Triton 2.51: 288 MB, for a million lists in lists of 275 bytes each."""

_PR_SET_CHILD_SUBREAPER = 36
_CHILD = Path(__file__).with_name("child.py")
_POLL_S = 0.25
_KILLED_MUST_END_S = 10.0


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


def start_server(command: Sequence[str], environment: Mapping[str, str]) -> ServerProcess:
    """Start a command, found on the environment's PATH, that is killed when this process ends.

    It has a process group of its own: otherwise Ctrl-C at its terminal (`docker run -it`) would end it, and the model,
    without a drain. So would a SIGTERM to its control group, as systemd sends: it is blocked, and SIGINT does the same.
    Its descendants inherit that, so that they survive the signal, too: a model ends a process of its own by SIGKILL.
    A command that can't be run is a child that prints the reason and ends with 127.
    Call it in the main thread: the kernel kills the server when the thread that started it ends.
    """
    # Not os.fork: a server that is started again is started beside threads. The new process prepares itself.
    child = [sys.executable, "-I", "-S", str(_CHILD), str(os.getpid()), *command]
    pid = os.posix_spawn(sys.executable, child, environment, setpgroup=0, setsigmask=(signal.SIGTERM, signal.SIGINT))
    return ServerProcess(pid)


def model_processes(server: int) -> list[psutil.Process]:
    """Return the model processes of tritonserver `server`: its children, one for each instance of the model.

    Triton 2.51 neither notices that one is gone nor starts it again. A model that is loading may not have its own yet.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in psutil.Process(server).children() if runs(child) and _name(child).startswith(STUB)]
    return []


def runs(process: psutil.Process) -> bool:
    """Return whether a process still exists, even stopped, stuck, or with another parent."""
    try:
        # Compares the start time, too: a later process may have its pid.
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs, so that they can be found and killed."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def set_stack_limit() -> None:
    """Set the thread stack size of processes started from now on to STACK_BYTES, or the hard limit.

    Triton parses nested JSON recursively and copies forms onto a thread's stack, and dies (signal 11) of a body of
    62 kB with the usual 8 MiB. Stacks are virtual memory: untouched pages cost nothing.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    # "Unlimited" is replaced too: the C library would make stacks of 2 MiB.
    size = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (size, hard))


def kill_children() -> None:
    """Kill all children, and theirs, which are adopted in turn. SIGCHLD must be blocked."""
    deadline = time.monotonic() + _KILLED_MUST_END_S
    while (children := psutil.Process().children()) and time.monotonic() < deadline:
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        signal.sigtimedwait((signal.SIGCHLD,), _POLL_S)
        for _ in _ended_children():
            pass


def shared_memory_prefix() -> str:
    """Return the prefix of the names of the Python backend's regions under this supervisor.

    The host name is the container's or the pod's, and the pid is 1 there: a container that is started again finds what
    it has left in a /dev/shm that outlived it, and others that share it keep theirs.
    """
    host = re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())
    return f"triton_python_backend_shm_region_{host}-{os.getpid()}_"


def remove_shared_memory(prefix: str) -> None:
    """Remove the regions whose names begin with the prefix; another user's, or a folder, stays."""
    for region in SHARED_MEMORY.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(PermissionError, IsADirectoryError):
            region.unlink(missing_ok=True)


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


def _ended_children() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status
