"""The process between the launcher and the server: it sees to it that nothing outlives anything.

    launcher ── guard (own session, subreaper) ── server ── the server's own children

- The launcher ends, in whatever way, SIGKILL included: the guard stops the server as a SIGTERM would.
- SIGTERM is passed on and starts the grace period; at its end the server is killed. SIGQUIT kills it at once. (Two
  signals, because two SIGTERMs in quick succession are one to a process that hasn't looked yet.)
- The server ends, in whatever way: children it left behind fall to the guard, which kills them.
- The guard itself is killed: the kernel kills the server (PR_SET_PDEATHSIG).

A process of its own because a library can't do this: it would have to change its host process's signal handling and
subreaper flag, and would die with it. Exits with the server's code, 128 + N when signal N ended it. Standard library
only, because it runs with `-I -S` to be quick. Knows nothing about Triton but what leftovers.py removes.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from triton_local.leftovers import EnvironmentFolder, remove_shared_memory

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
_POLL_S = 0.25
_KILLED_MUST_END_S = 10.0


def main(argv: Sequence[str]) -> int:
    """Run the command after `--` under guard; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--shm-prefix", required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)

    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    environment_folder = EnvironmentFolder(options.shm_prefix)
    server = _start(options.command, options.report_fd)
    os.write(options.report_fd, f"{server}\n".encode())
    os.close(options.report_fd)
    try:
        return _watch(server, options.parent, options.grace, environment_folder)
    finally:
        _kill_children()
        remove_shared_memory(options.shm_prefix)
        environment_folder.remove()


def _start(command: Sequence[str], report_fd: int) -> int:
    guard = os.getpid()
    server = os.fork()
    if server:
        return server
    try:
        os.close(report_fd)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it died before the kernel was told
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # SIGPIPE stays ignored, as Python set it: a dead launcher's log pipe must not cut the drain short.
        os.execv(command[0], list(command))
    except OSError as error:
        _say(f"{command[0]} can't be run: {error.strerror}")
    finally:
        os._exit(127)


def _watch(server: int, parent: int, grace: float, environment_folder: EnvironmentFolder) -> int:
    """Wait for the server's end and pass requests to stop on; its exit code."""
    deadline: float | None = None  # of the grace period, once it has begun
    while (code := _reap(server)) is None:
        environment_folder.look()
        received = signal.sigtimedwait(_SIGNALS, _POLL_S)
        number = None if received is None else received.si_signo
        asked_to_end = number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if number == signal.SIGQUIT:
            os.kill(server, signal.SIGKILL)
        elif deadline is None and (asked_to_end or os.getppid() != parent):
            os.kill(server, signal.SIGTERM)
            deadline = time.monotonic() + grace
        elif deadline is not None and time.monotonic() > deadline:
            _say(f"tritonserver didn't end within {grace:.0f} s of SIGTERM: killed")
            os.kill(server, signal.SIGKILL)
            deadline = float("inf")
    return code


def _reap(server: int) -> int | None:
    """Collect every child that has ended; the server's exit code once it is among them."""
    for pid, status in _ended_children():
        if pid == server:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
    return None


def _ended_children() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def _kill_children() -> None:
    """Kill what the server left behind, generation after generation: a killed child's children become ours."""
    deadline = time.monotonic() + _KILLED_MUST_END_S
    while (children := _children()) and time.monotonic() < deadline:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait((signal.SIGCHLD,), _POLL_S)
        for _ in _ended_children():
            pass


def _children() -> list[int]:
    guard = str(os.getpid())
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            # "pid (name) state ppid ...", and a name may hold spaces and parentheses.
            if stat.read_text(errors="replace").rpartition(")")[2].split()[1] == guard:
                found.append(int(stat.parent.name))
    return found


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _say(message: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the launcher, which would have read it, is gone
        os.write(sys.stdout.fileno(), f"triton_local: {message}\n".encode())
