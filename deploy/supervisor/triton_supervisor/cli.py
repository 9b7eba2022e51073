"""The container's command line: serve under supervision, or announce the shutdown.

    python -m triton_supervisor [TRITONSERVER_OPTIONS ...]
    python -m triton_supervisor announce --seconds 15

`announce` is the hook that an orchestrator runs before it sends SIGTERM (Kubernetes: preStop): the server stops being
ready, so load balancers remove it, and goes on serving meanwhile. Messages go to standard error, one line each.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from triton_supervisor.command import plan_container
from triton_supervisor.hardening import new_key, set_stack_limit
from triton_supervisor.life import Life
from triton_supervisor.loop import Wishes, block_signals, run
from triton_supervisor.process import adopt_orphans, kill_children, start_server
from triton_supervisor.ready_port import ReadyPort
from triton_supervisor.restarting import Restarting
from triton_supervisor.restarts import Restarts
from triton_supervisor.settings import RESTARTS_VARIABLE, RefusedError, Settings
from triton_supervisor.shared_memory import container_prefix, remove_shared_memory
from triton_supervisor.state import StateFile, announcement_file
from triton_supervisor.supervision import SupervisedServer, Supervision

REFUSED = 2
_NAME = "triton_supervisor"
LONGEST_ANNOUNCEMENT_S = 3600


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    try:
        if arguments[:1] == ["announce"]:
            announce(os.environ, _announcement(arguments[1:]))
            return 0
        return _serve(arguments, os.environ)
    except RefusedError as error:
        _say(str(error))
        return REFUSED


def announce(environment: Mapping[str, str], seconds: float) -> None:
    """Announce the shutdown and sleep. Raises RefusedError without a state file, or if it can't be written."""
    state_file = environment.get("TRITON_STATE_FILE")
    if not state_file:
        raise RefusedError("TRITON_STATE_FILE is not set; it must be the server's, which looks beside it")
    try:
        announcement_file(Path(state_file)).touch()
    except OSError as error:
        raise RefusedError(f"TRITON_STATE_FILE is {state_file}: nothing can be announced: {error.strerror}") from error
    time.sleep(seconds)


def _announcement(arguments: Sequence[str]) -> float:
    parser = argparse.ArgumentParser(
        prog="triton_supervisor announce", description="Make the server not ready; it goes on serving."
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="return after this time (default: %(default)g)")
    seconds: float = parser.parse_args(arguments).seconds
    if not 0 <= seconds <= LONGEST_ANNOUNCEMENT_S:
        raise RefusedError(f"--seconds is {seconds:g}; it must be 0 ... {LONGEST_ANNOUNCEMENT_S}")
    return seconds


def _serve(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    # As process 1, `__main__` has blocked them before it imported this.
    block_signals()
    settings = Settings.of(environment)
    adopt_orphans()
    prefix = container_prefix()
    remove_shared_memory(prefix)
    key = new_key()
    plan = plan_container(arguments, environment, settings, key, prefix)
    state = StateFile(settings.state_file, _say)
    ready_port = None if settings.ready_port is None else ReadyPort(settings.ready_port, state)
    set_stack_limit()

    supervised = SupervisedServer(
        http=plan.http,
        metrics=plan.metrics,
        key=key,
        shm_prefix=prefix,
        grace=settings.grace,
        notice=settings.notice,
        stuck=settings.stuck or None,
        models=plan.models,
    )

    def begin(restarts: int) -> Life:
        server = start_server(plan.arguments, _NAME, {**plan.environment, RESTARTS_VARIABLE: str(restarts)})
        return Life(server, Supervision(server, supervised, state, _say))

    def clean_up() -> None:
        kill_children()
        remove_shared_memory(prefix)

    try:
        if ready_port is not None:
            ready_port.begin()
        restarts = Restarts(settings.restarts, settings.restart_minutes)
        return run(Restarting(begin, clean_up, restarts, state, _say), Wishes(again_kills=True), lambda: None)
    finally:
        clean_up()


def _say(message: str) -> None:
    # Unbuffered and in one write, because tritonserver writes to the same file. Its reader may have left.
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"{_NAME}: {message}\n".encode())
