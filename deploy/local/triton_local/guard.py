"""The process between the launcher and the server, which guarantees that none of them outlives the other.

    launcher ── guard (own session, subreaper) ── server ── the server's own children

- The launcher ends, even by SIGKILL: the guard handles it like SIGTERM.
- SIGTERM: accepted requests are answered within the grace period, then the server ends, or is killed. SIGQUIT kills it
  at once. (Another signal, because two pending SIGTERMs are one.)
- The model's process dies, or makes no steps any more: the guard ends the server with code 70.
- The server ends: the guard kills its orphans.
- The guard itself is killed: the kernel kills the server.

A process of its own, because a library would have to change its host's signal handling and subreaper flag, and would
die with it. `triton_supervisor` does the work, as in the container. Exits with 128 + N when signal N ended the server.
Standard library only: it runs with `-I -S`, to start fast.

What a killed server leaves: shared memory regions have a prefix that the launcher made unique. The Python backend's
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
from triton_supervisor.hardening import new_key, set_stack_limit
from triton_supervisor.loop import Course, Unwatched, Wishes, block_signals, run
from triton_supervisor.process import (
    SHARED_MEMORY,
    ServerProcess,
    adopt_orphans,
    kill_children,
    remove_shared_memory,
    start_server,
)
from triton_supervisor.repository_api import control_arguments
from triton_supervisor.settings import RefusedError
from triton_supervisor.state import StateFile
from triton_supervisor.supervision import supervise

# Where the backend's environment manager creates its folder.
ENVIRONMENT_FOLDERS = Path("/tmp")

_BACKEND_LIBRARY = "libtriton_python.so"
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
    """What the launcher reads from the guard: the server's pid in a line, then the end once its model is watched.

    A model that dies before its processes are known is noticed only by the probes, minutes later: the launcher calls a
    supervised server ready after this.
    """

    def __init__(self, descriptor: int, server: int) -> None:
        self._descriptor: int | None = descriptor
        os.write(descriptor, f"{server}\n".encode())

    def watched(self) -> None:
        """Close the report; a second call has no effect."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _a_python_backend_runs() -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        # Gone, or another user's, whose folders the owner check excludes.
        with contextlib.suppress(OSError):
            if _BACKEND_LIBRARY in maps.read_text(errors="replace"):
                return True
    return False


def main(argv: Sequence[str]) -> int:
    """Run the command after `--` under guard; return the exit code."""
    options = _parse(argv)
    block_signals()
    adopt_orphans()
    environment_folder = EnvironmentFolder(options.shm_prefix)
    key = new_key() if options.supervised else ""
    # In front: an option without its value would consume what follows.
    program, *others = options.command
    arguments = [program, *(control_arguments(key, options.model) if options.supervised else ()), *others]
    set_stack_limit()
    # If the server inherited it, the launcher would wait for the server's end to read its line.
    os.set_inheritable(options.report_fd, False)
    try:
        state = StateFile(options.state_file, _say)
        server = start_server(arguments, _say)
        report = Report(options.report_fd, server.pid)
        wishes = Wishes(again_kills=False, parent=options.parent)

        def each_round() -> None:
            environment_folder.look()
            if state.condition.state != "starting":
                report.watched()

        return run(server, _course(server, key, state, options), wishes, each_round)
    except RefusedError as error:
        _say(str(error))
        return _REFUSED
    finally:
        kill_children()
        remove_shared_memory(options.shm_prefix)
        environment_folder.remove()


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
    parser.add_argument("--notice", type=float, default=0.0)
    parser.add_argument("--stuck", type=float)
    parser.add_argument("--state-file", type=Path)
    parser.add_argument("command", nargs="+")
    return parser.parse_args(argv)


def _course(server: ServerProcess, key: str, state: StateFile, options: argparse.Namespace) -> Course:
    if not options.supervised:
        return Unwatched(server, options.grace, _say)
    return supervise(
        server,
        Address(options.host, options.http_port),
        None if options.metrics_port is None else Address(options.host, options.metrics_port),
        key,
        state,
        _say,
        grace=options.grace,
        notice=options.notice,
        stuck=options.stuck,
        models=options.model,
    )


def _say(message: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the launcher is gone
        os.write(sys.stdout.fileno(), f"triton_local: {message}\n".encode())
