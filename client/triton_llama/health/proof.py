"""Whether the model computes: a young step, else one token, else a step that came while we waited for it.

A server that steps isn't burdened, and one that idles computes a token. With several instances of the model (one a GPU,
say) each must have made a young step; else one token must come, from whichever instance Triton picks, and no instance
may hang with rows in its slots. An instance that died idle isn't noticed while another answers: one instance a server
is what this proves.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from triton_llama.health.address import Address
from triton_llama.health.limits import Limits
from triton_llama.health.one_token import Asked, Came, ask_for_a_token
from triton_llama.health.pulse import Pulse, look

PAUSE_SECONDS = 1.0
"""Between two requests that a full queue refuses, each of which Triton counts, or between two looks."""


class Proof(NamedTuple):
    """computes: yes or no. reason: in one line. loaded: False if Triton says that the model isn't there at all."""

    computes: bool
    reason: str
    loaded: bool = True


def prove(endpoint: Address, metrics: Address | None, model: str, limits: Limits, deadline: float) -> Proof:
    """Find out, by `deadline` on the monotonic clock and the time of a last look at the metrics.

    metrics: where they are; None: the server has none, whoever may answer beside it. Then a token is all that counts.
    """
    before = look(metrics, model)
    if before.beats(limits.step_age):
        return Proof(True, before.beat())
    asked = _ask(endpoint, model, limits, deadline)
    if asked.came is Came.TOKEN and len(before.instances) < 2:
        # Proof enough, and the metrics may not know of it yet.
        return Proof(True, asked.reason + _without(before))
    while True:
        now = look(metrics, model)
        hanging = now.hanging(before, limits.step_age)
        if not hanging and asked.came is Came.TOKEN:
            return Proof(True, asked.reason + _without(now))
        if not hanging and (now.beats(limits.step_age) or now.moved(before)):
            # Slow, or more than it can take, but alive.
            return Proof(True, f"{asked.reason}, but {now.beat()}")
        if asked.came not in (Came.TOKEN, Came.REFUSED) or time.monotonic() >= deadline:
            break
        time.sleep(PAUSE_SECONDS)
        if asked.came is Came.REFUSED:
            again = _ask(endpoint, model, limits, deadline)
            # One that is late had what was left of the time, and says less than the refusal before.
            asked = asked if again.came is Came.LATE else again
    names = f", and rows hang in {' '.join(one.name for one in hanging)}" if hanging else ""
    return Proof(False, f"{asked.reason}{names}, {now.describe()}", loaded=asked.came is not Came.NOT_LOADED)


def _ask(endpoint: Address, model: str, limits: Limits, deadline: float) -> Asked:
    asked = ask_for_a_token(endpoint, model, deadline - time.monotonic())
    # What was left of the time is nobody's concern.
    return asked._replace(reason=f"no token within {limits.timeout:g} s") if asked.came is Came.LATE else asked


def _without(pulse: Pulse) -> str:
    return "" if pulse.instances else f" ({pulse.describe()})"
