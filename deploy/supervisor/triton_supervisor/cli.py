"""The container's command line: serve under supervision, or announce the end.

    python -m triton_supervisor [TRITONSERVER_OPTIONS ...]
    python -m triton_supervisor announce --seconds 15

Puts the other modules together for the container, where this is the first process; `triton_local.guard` does so for a
server without one. What it says itself are lines on standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence

from triton_supervisor.announce import announce
from triton_supervisor.container import plan_container
from triton_supervisor.loop import Wishes, run
from triton_supervisor.process import adopt_orphans, kill_children, start_server
from triton_supervisor.ready_port import ReadyPort
from triton_supervisor.restricted import new_key
from triton_supervisor.settings import RefusedError, Settings
from triton_supervisor.shared_memory import container_prefix, remove_shared_memory
from triton_supervisor.signals import block_signals
from triton_supervisor.stack_limit import set_stack_limit
from triton_supervisor.state_file import StateFile
from triton_supervisor.supervised import supervise

REFUSED = 2
LONGEST_ANNOUNCEMENT_S = 3600


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments say; return the exit code."""
    try:
        if arguments[:1] == ["announce"]:
            announce(os.environ, _announcement(arguments[1:]))
            return 0
        return _serve(arguments, os.environ)
    except RefusedError as error:
        _say(str(error))
        return REFUSED


def _announcement(arguments: Sequence[str]) -> float:
    parser = argparse.ArgumentParser(
        prog="triton_supervisor announce", description="From now on the server isn't ready; it goes on serving."
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="return after so long (default: %(default)g)")
    seconds: float = parser.parse_args(arguments).seconds
    if not 0 <= seconds <= LONGEST_ANNOUNCEMENT_S:
        raise RefusedError(f"--seconds is {seconds:g}; it must be 0 ... {LONGEST_ANNOUNCEMENT_S}")
    return seconds


def _serve(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    # Process 1 has done so already, before it imported this.
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
    server = start_server(plan.arguments, _say, plan.environment)
    try:
        # Its threads only now: the server has to be started before there are any.
        if ready_port is not None:
            ready_port.begin()
        course = supervise(
            server,
            plan.http,
            plan.metrics,
            key,
            state,
            _say,
            grace=settings.grace,
            notice=settings.notice,
            stuck=settings.stuck or None,
        )
        return run(server, course, Wishes(again_kills=True), lambda: None)
    finally:
        kill_children()
        remove_shared_memory(prefix)


def _say(message: str) -> None:
    # Unbuffered, in one write: tritonserver writes to the same place. And whoever read it may be gone.
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"triton_supervisor: {message}\n".encode())
