"""tritonserver and the model's processes: started, watched, killed, and their shared memory removed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
STUB = "triton_python_b"
"""triton_python_backend_stub, a model's process; the kernel keeps 15 characters of a name."""

STACK_BYTES = 512 * 2**20
"""More than a body of 2 MiB can take in Triton 2.51: 288 MB, for a million lists in lists of 275 bytes each."""

_PR_SET_PDEATHSIG = 1
_KILLED_MUST_END_S = 10.0


def start_server(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start tritonserver, found on the environment's PATH; the kernel kills it when this process ends.

    It has a process group of its own: otherwise Ctrl-C at its terminal (`docker run -it`) would end it, and the model,
    without a drain. So would a SIGTERM to its control group, as systemd sends: it stays blocked, as `block_signals`
    left it, and SIGINT does the same. Its descendants inherit that, so that they survive the signal, too. SIGPIPE stays
    ignored: a log reader that leaves must not interrupt the drain. Call it in the main thread, before there are others:
    the kernel kills the server when the thread that started it ends. Raises OSError.
    """
    prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # Python would print a traceback of a SIGINT that comes before the program is replaced.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    return subprocess.Popen(command, env=environment, process_group=0, restore_signals=False, preexec_fn=prepare)


def exit_code(server: subprocess.Popen[bytes]) -> int | None:
    """Return the server's exit code once it has ended, 128 + N for signal N."""
    code = server.poll()
    return 128 - code if code is not None and code < 0 else code


def kill_server(server: subprocess.Popen[bytes], models: Collection[psutil.Process]) -> None:
    """Kill what is left of tritonserver's process group, and wait until the server and `models` have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    deadline = time.monotonic() + _KILLED_MUST_END_S
    while any(map(runs, models)) and time.monotonic() < deadline:
        time.sleep(0.01)


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


def set_stack_limit() -> None:
    """Set the thread stack size of processes started from now on to STACK_BYTES, or the hard limit.

    Triton parses nested JSON recursively and copies forms onto a thread's stack, and dies (signal 11) of a body of
    62 kB with the usual 8 MiB. Stacks are virtual memory: untouched pages cost nothing.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    # "Unlimited" is replaced too: the C library would make stacks of 2 MiB.
    size = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (size, hard))


def remove_shared_memory(prefix: str) -> None:
    """Remove the Python backend's regions whose names begin with the prefix."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""
