"""The process between the launcher and the server, which guarantees that none of them outlives the other.

    launcher ── guard (own session, subreaper) ── server ── the server's own children

- The launcher ends, even by SIGKILL: the guard handles it like SIGUSR1.
- SIGUSR1: accepted requests are answered within the grace period, then the server ends, or is killed. SIGQUIT kills it
  at once. SIGTERM has no effect: one to every process of a control group is the launcher's to interpret.
- The server dies, or its model does, or makes no steps any more: the guard kills what is left, and starts it again.
- The server ends: the guard kills its orphans.
- The guard itself is killed: the kernel kills the server.

A process of its own, because a library would have to change its host's signal handling and subreaper flag, and would
die with it. `triton_supervisor` does the work, as in the container. Exits with 128 + N when signal N ended the server.
Standard library only: it runs with `-I -S`, to start fast.

What a killed server leaves: shared memory regions have a prefix that the launcher made unique, and a guard that starts
removes those of guards that were killed with their launchers. The Python backend's
`/tmp/python_env_*` folder has no mark, and another running Triton may need one that looks the same, so ours is
recognised while its server starts.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from triton_llama.health import Address
from triton_supervisor.answers import counts_environment
from triton_supervisor.hardening import new_key, set_stack_limit
from triton_supervisor.life import Life, LifeCourse, Unwatched
from triton_supervisor.loop import Wishes, block_signals, run
from triton_supervisor.process import ServerProcess, adopt_orphans, kill_children, start_server
from triton_supervisor.repository_api import control_arguments
from triton_supervisor.restarting import Restarting
from triton_supervisor.restarts import Restarts
from triton_supervisor.settings import RESTARTS_VARIABLE, RefusedError
from triton_supervisor.shared_memory import (
    SHARED_MEMORY,
    Ownership,
    cancellations_environment,
    remove_orphaned,
    remove_shared_memory,
)
from triton_supervisor.state import StateFile
from triton_supervisor.supervision import SupervisedServer, Supervision

from triton_local.errors import LauncherError
from triton_local.ports import SERVICES, HeldPorts, reachable_host

# Where the backend's environment manager creates its folder.
ENVIRONMENT_FOLDERS = Path("/tmp")

_BACKEND_LIBRARY = "libtriton_python.so"
_NAME = "triton_local"
_REFUSED = 2


class EnvironmentFolder:
    """The `python_env_*` folder of the server that is about to start.

    It exists by the time the server's first shared memory region does. A single folder created between this object and
    that moment is ours. Of several (another Triton started within the same half second) ours is unknown, and they are
    removed only when no other Triton runs that could need one.
    """

    def __init__(self, shm_prefix: str) -> None:
        self._shm_prefix = shm_prefix
        self._since = time.time()
        self._ours: Path | None = None
        self._looked = False

    def look(self) -> None:
        """Recognise it; call it often while the server starts, it is cheap afterwards."""
        if not self._looked and any(SHARED_MEMORY.glob(f"{self._shm_prefix}*")):
            self._looked = True
            candidates = self._candidates()
            self._ours = candidates[0] if len(candidates) == 1 else None

    def remove(self) -> None:
        """Remove it if the server didn't; call it once the server is gone."""
        if self._ours is not None:
            folders = [self._ours]
        elif not _a_python_backend_runs():
            folders = self._candidates()
        else:
            folders = []
        for folder in folders:
            with contextlib.suppress(OSError):  # removed already, or not empty and so in use
                folder.rmdir()

    def _candidates(self) -> list[Path]:
        found = []
        for folder in ENVIRONMENT_FOLDERS.glob("python_env_??????"):
            with contextlib.suppress(FileNotFoundError):  # just removed by its server
                facts = folder.lstat()
                if facts.st_uid == os.getuid() and facts.st_ctime >= self._since:
                    found.append(folder)
        return found


class Report:
    """What the launcher reads from the guard, a line for each change: the server's pid, and "starting" or "serving".

    A model that dies before its processes are known is noticed only by the probes, minutes later: the launcher calls a
    supervised server ready after it is "serving". The pipe holds more lines than there are restarts.
    """

    def __init__(self, descriptor: int) -> None:
        # If the server inherited it, the launcher would wait for the server's end to read the end of the report.
        os.set_inheritable(descriptor, False)
        self._descriptor = descriptor
        self._last = ""

    def write(self, server: int, condition: str) -> None:
        """Write a line, unless it is the last one again."""
        line = f"{server} {condition}\n"
        if line != self._last:
            self._last = line
            with contextlib.suppress(BrokenPipeError):  # the launcher is gone
                os.write(self._descriptor, line.encode())


def _a_python_backend_runs() -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        # Gone, or another user's, whose folders the owner check excludes.
        with contextlib.suppress(OSError):
            if _BACKEND_LIBRARY in maps.read_text(errors="replace"):
                return True
    return False


class Guard:
    """One tritonserver after another, and what each leaves behind."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._report = Report(options.report_fd)
        self._state = StateFile(options.state_file, _say)
        self._key = new_key() if options.supervised else ""
        try:
            remove_orphaned(_say)
            self._ownership = Ownership(options.shm_prefix)
        except OSError as error:
            raise RefusedError(f"{SHARED_MEMORY} can't be used: {error}") from error
        self._environment_folder = EnvironmentFolder(options.shm_prefix)
        self._held: HeldPorts | None = None
        self._server = 0

    def run(self) -> int:
        """Serve until the end; return the exit code."""
        options = self._options
        restarts = Restarts(options.restarts, options.restart_minutes)
        course = Restarting(self._begin, self._clean_up, restarts, self._state, _say)
        return run(course, Wishes(again_kills=False, parent=options.parent), self._each_round)

    def close(self) -> None:
        """Remove what a server has left, however it has ended, and release its ports."""
        self._remove_remains()
        self._ownership.release()
        self._release_ports()

    def _remove_remains(self) -> None:
        kill_children()
        remove_shared_memory(self._options.shm_prefix)
        self._environment_folder.remove()

    def _clean_up(self) -> None:
        self._remove_remains()
        if self._state.condition.state == "starting":  # another one follows, after a pause perhaps
            self._hold_ports()

    def _begin(self, restarts: int) -> Life:
        options = self._options
        self._environment_folder = EnvironmentFolder(options.shm_prefix)
        # In front: an option without its value would consume what follows.
        program, *others = options.command
        control = control_arguments(self._key, options.model) if options.supervised else ()
        counts = counts_environment(options.shm_prefix) if options.supervised else {}
        cancellations = cancellations_environment(options.shm_prefix)
        environment = {**os.environ, **counts, **cancellations, RESTARTS_VARIABLE: str(restarts)}
        server = start_server([program, *control, *others], _NAME, environment)
        self._server = server.pid
        self._report.write(server.pid, "starting")
        return Life(server, self._course(server))

    def _course(self, server: ServerProcess) -> LifeCourse:
        options = self._options
        if not options.supervised:
            return Unwatched(server, options.grace, _say)
        host = reachable_host(options.host)
        supervised = SupervisedServer(
            http=Address(host, options.http_port),
            metrics=None if options.metrics_port is None else Address(host, options.metrics_port),
            key=self._key,
            shm_prefix=options.shm_prefix,
            grace=options.grace,
            notice=options.notice,
            stuck=options.stuck,
            models=options.model,
        )
        return Supervision(server, supervised, self._state, _say)

    def _each_round(self) -> None:
        self._environment_folder.look()
        state = self._state.condition.state
        # One that drains may have served before, or not yet: the last report holds.
        if state in ("starting", "serving"):
            self._report.write(self._server, state)
        if state == "serving":
            self._release_ports()

    def _hold_ports(self) -> None:
        """Keep other programs from a dead server's ports until the next one has them, as the launcher does before."""
        if self._held is not None:
            return
        # Its services' names don't matter here; a number for each.
        try:
            self._held = HeldPorts(self._options.host, dict(zip(SERVICES, self._options.hold, strict=False)))
        except LauncherError as error:
            _say(f"{error}; tritonserver is started all the same")

    def _release_ports(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


def main(argv: Sequence[str]) -> int:
    """Run the command after `--` under guard; return the exit code."""
    options = _parse(argv)
    block_signals()
    adopt_orphans()
    set_stack_limit()
    try:
        guard = Guard(options)
    except RefusedError as error:
        _say(str(error))
        return _REFUSED
    try:
        return guard.run()
    finally:
        guard.close()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--shm-prefix", required=True)
    parser.add_argument("--supervised", action="store_true")
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--http-port", type=int)
    parser.add_argument("--metrics-port", type=int)
    parser.add_argument("--hold", type=int, action="append", default=[])
    parser.add_argument("--notice", type=float, default=0.0)
    parser.add_argument("--stuck", type=float)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--restart-minutes", type=float, default=1.0)
    parser.add_argument("--state-file", type=Path)
    parser.add_argument("command", nargs="+")
    return parser.parse_args(argv)


def _say(message: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the launcher is gone
        os.write(sys.stdout.fileno(), f"{_NAME}: {message}\n".encode())
