"""Puts a supervised server's parts together: what the container and `triton_local` have in common."""

from __future__ import annotations

from collections.abc import Callable

from triton_llama.health import Address

from triton_supervisor.liveness import Liveness, Pace, live_question
from triton_supervisor.process import ServerProcess
from triton_supervisor.repository_api import RepositoryApi
from triton_supervisor.state_file import StateFile
from triton_supervisor.supervision import Supervision
from triton_supervisor.watch import Watch


def supervise(
    server: ServerProcess,
    http: Address,
    metrics: Address | None,
    key: str,
    state: StateFile,
    say: Callable[[str], None],
    *,
    grace: float,
    notice: float,
    stuck: float | None,
) -> Supervision:
    """Return the course of a server that was started with `control_arguments(key)`.

    metrics: None when they are off. grace, notice, stuck: seconds, as in Settings; stuck None asks the model for
    nothing. say: takes a line. Starts threads.
    """
    api = RepositoryApi(http, key)
    liveness = None
    if stuck is not None:
        pace = Pace.for_verdict_within(stuck)
        liveness = Liveness(live_question(http, metrics, pace), pace, say)
    watch = Watch(server.pid, api.listens, liveness, say)
    return Supervision(server, api, watch, state, say, grace=grace, notice=notice)
