"""The container's command line: serve under supervision, or announce the shutdown.

    python -m triton_supervisor [TRITONSERVER_OPTIONS ...]
    python -m triton_supervisor announce --seconds 15
    python -m triton_supervisor plan < PLAN

`announce` is the hook that an orchestrator runs before it sends SIGTERM (Kubernetes: preStop): the server stops being
ready, so load balancers remove it, and goes on serving meanwhile. `plan` serves a plan of the launcher's, in JSON.
Messages go to standard error, one line each.
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
from triton_supervisor.hardening import set_stack_limit
from triton_supervisor.plan import Plan
from triton_supervisor.process import adopt_orphans
from triton_supervisor.ready_port import ReadyPort
from triton_supervisor.settings import RefusedError, Settings
from triton_supervisor.shared_memory import container_prefix, remove_shared_memory
from triton_supervisor.signals import block_signals
from triton_supervisor.state import StateFile, announcement_file
from triton_supervisor.supervisor import NAME, Supervisor

REFUSED = 2
MAX_ANNOUNCEMENT_S = 3600


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    try:
        if arguments[:1] == ["announce"]:
            announce(os.environ, _announcement(arguments[1:]))
            return 0
        # As process 1, `__main__` has blocked them before it imported this.
        block_signals()
        if arguments[:1] == ["plan"]:
            return _serve(Plan.from_json(sys.stdin.read()))
        settings = Settings.of(os.environ)
        return _serve(plan_container(arguments, os.environ, settings, container_prefix()))
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
    if not 0 <= seconds <= MAX_ANNOUNCEMENT_S:
        raise RefusedError(f"--seconds is {seconds:g}; it must be 0 ... {MAX_ANNOUNCEMENT_S}")
    return seconds


def _serve(plan: Plan) -> int:
    """Supervise a plan; return the exit code. Raises RefusedError before anything is started."""
    adopt_orphans()
    remove_shared_memory(plan.shm_prefix)
    state = StateFile(plan.state_file, _say)
    if plan.ready_port is not None:
        ReadyPort(plan.ready_port, state).begin()
    set_stack_limit()
    return Supervisor(plan, state, _say).run()


def _say(message: str) -> None:
    # Unbuffered and in one write, because tritonserver writes to the same file. Its reader may have left.
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"{NAME}: {message}\n".encode())
