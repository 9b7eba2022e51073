"""`announce`: the hook that an orchestrator runs before it sends SIGTERM (Kubernetes: preStop).

From now on the server isn't ready, so load balancers take it off their lists; until they all have, it goes on serving.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from triton_supervisor.settings import RefusedError
from triton_supervisor.state_file import announcement_file


def announce(environment: Mapping[str, str], seconds: float) -> None:
    """Announce the end, and return after so many seconds.

    Raises RefusedError when there is no state file to announce it beside, or it can't be written.
    """
    state_file = environment.get("TRITON_STATE_FILE")
    if not state_file:
        raise RefusedError("TRITON_STATE_FILE is not set; it must be the server's, which looks beside it")
    try:
        announcement_file(Path(state_file)).touch()
    except OSError as error:
        raise RefusedError(f"TRITON_STATE_FILE is {state_file}: nothing can be announced: {error.strerror}") from error
    time.sleep(seconds)
