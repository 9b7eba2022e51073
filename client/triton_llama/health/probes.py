"""The three questions that orchestrators ask: is it healthy, is it alive, is it ready.

They differ in what a server that loads or drains is: alive (killing it would only make it start, or lose what it is
finishing), not ready (it takes no requests), and as healthy as the evidence.
"""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import quote

from triton_llama.health.address import Address
from triton_llama.health.exchange import NoAnswerError, exchange
from triton_llama.health.limits import Limits
from triton_llama.health.proof import prove
from triton_llama.health.state import DRAINING, FAILED, SERVING, STARTING, read_state
from triton_llama.health.verdict import Verdict

MODEL = "llama"


def healthy(
    endpoint: Address,
    metrics: Address | None,
    limits: Limits,
    *,
    model: str = MODEL,
    state_file: Path | None = None,
) -> Verdict:
    """Tell whether the engine has made a step lately, else whether a token comes out of the model in time.

    endpoint: Triton's HTTP endpoint. metrics: its metrics, by default at `endpoint.metrics`; None: it has none. If none
    are there, it does without them. state_file: the supervisor's; None, or a file that isn't there, is no supervisor.
    Takes at most `limits.timeout` and 2 s; never raises for anything that a server does.
    """
    deadline = time.monotonic() + limits.timeout
    state = read_state(state_file)
    if state is not None and state.name == FAILED:
        return Verdict(False, state.describe())
    proof = prove(endpoint, metrics, model, limits, deadline)
    known = f" ({state.describe()})" if state is not None and state.name != SERVING and not proof.computes else ""
    return Verdict(proof.computes, proof.reason + known)


def live(
    endpoint: Address,
    metrics: Address | None,
    limits: Limits,
    *,
    model: str = MODEL,
    state_file: Path | None = None,
) -> Verdict:
    """Tell whether there is no reason to start the server anew: its model isn't dead, stuck, or failing every step.

    Arguments and bounds as for `healthy`. A server that listens and has no model (it loads, or is unloaded) is alive.
    One that doesn't listen is alive only if the state file says that it starts or drains: Triton listens once its
    models are loaded.
    """
    deadline = time.monotonic() + limits.timeout
    state = read_state(state_file)
    if state is not None and state.name in (FAILED, STARTING, DRAINING):
        return Verdict(state.name != FAILED, state.describe())
    proof = prove(endpoint, metrics, model, limits, deadline)
    return Verdict(proof.computes or not proof.loaded, proof.reason)


def ready(
    endpoint: Address,
    metrics: Address | None,
    limits: Limits,
    *,
    model: str = MODEL,
    state_file: Path | None = None,
) -> Verdict:
    """Tell whether requests should be sent here: Triton says that the model is ready, it doesn't drain, and is healthy.

    Arguments and bounds as for `healthy`.
    """
    deadline = time.monotonic() + limits.timeout
    state = read_state(state_file)
    if state is not None and state.name != SERVING:
        return Verdict(False, state.describe())
    for path in ("/v2/health/ready", f"/v2/models/{quote(model, safe='')}/ready"):
        try:
            status = exchange(endpoint, "GET", path, deadline - time.monotonic()).status
        except NoAnswerError as error:
            return Verdict(False, str(error))
        if status != 200:
            return Verdict(False, f"{endpoint}{path} says HTTP {status}")
    proof = prove(endpoint, metrics, model, limits, deadline)
    return Verdict(proof.computes, proof.reason)
