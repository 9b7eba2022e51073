"""The process between the launcher and the server: it sees to it that nothing outlives anything.

    launcher ── guard (own session, subreaper) ── server ── the server's own children

- The launcher ends, in whatever way, SIGKILL included: the guard ends the server as on SIGTERM.
- SIGTERM: what was accepted is answered within the grace period, then the server ends; at its end it is killed.
  SIGQUIT kills it at once. (Two signals, because two SIGTERMs in quick succession are one to a process that hasn't
  looked yet.)
- The model's process dies, or does nothing any more: the guard ends the server with code 70.
- The server ends, in whatever way: children it left behind fall to the guard, which kills them.
- The guard itself is killed: the kernel kills the server.

A process of its own because a library can't do this: it would have to change its host process's signal handling and
subreaper flag, and would die with it. How it is done is `triton_supervisor`'s, which does the same in the container.
Exits with 128 + N when signal N ended the server. Standard library only, because it runs with `-I -S` to be quick.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from triton_llama.health import Address
from triton_supervisor.hardening import new_key, set_stack_limit
from triton_supervisor.loop import Course, Unwatched, Wishes, block_signals, run
from triton_supervisor.process import ServerProcess, adopt_orphans, kill_children, remove_shared_memory, start_server
from triton_supervisor.repository_api import control_arguments
from triton_supervisor.settings import RefusedError
from triton_supervisor.state import StateFile
from triton_supervisor.supervision import supervise

from triton_local.leftovers import EnvironmentFolder

_REFUSED = 2


def main(argv: Sequence[str]) -> int:
    """Run the command after `--` under guard; returns the exit code."""
    options = _parse(argv)
    block_signals()
    adopt_orphans()
    environment_folder = EnvironmentFolder(options.shm_prefix)
    key = new_key() if options.supervised else ""
    # In front: behind an option that lacks its value they would be taken for it.
    program, *others = options.command
    arguments = [program, *(control_arguments(key) if options.supervised else ()), *others]
    set_stack_limit()
    # The server must not inherit it, or the launcher would wait for the server's end to read its line.
    os.set_inheritable(options.report_fd, False)
    try:
        state = StateFile(options.state_file, _say)
        server = start_server(arguments, _say)
        os.write(options.report_fd, f"{server.pid}\n".encode())
        os.close(options.report_fd)
        wishes = Wishes(again_kills=False, parent=options.parent)
        return run(server, _course(server, key, state, options), wishes, environment_folder.look)
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
    )


def _say(message: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the launcher, which would have read it, is gone
        os.write(sys.stdout.fileno(), f"triton_local: {message}\n".encode())
