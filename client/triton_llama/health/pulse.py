"""The model's last steps, read off Triton's metrics page: evidence that it computes, for nothing.

A process that has died leaves its last values behind, so a step is evidence only while it is young, or when it has come
since an earlier look. Knows the names of two metrics and Prometheus' text format; what follows from it is `proof.py`'s.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import NamedTuple

from triton_llama.health.address import Address
from triton_llama.health.exchange import NoAnswerError, exchange

LAST_STEP = "llama_last_step_timestamp_seconds"
SLOTS_IN_USE = "llama_slots_in_use"

LOOK_SECONDS = 2.0
"""How long the page may take. It comes from a thread of tritonserver that does nothing else."""

CLOCK_SECONDS = 1.0
"""How far in the future a step may lie. Beyond, the clocks disagree, and its age is anybody's guess."""

_SERIES = re.compile(rf"^({LAST_STEP}|{SLOTS_IN_USE})\{{(.*)\}} ([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Instance(NamedTuple):
    """One process of the model. last_step: seconds since 1970, 0 before the first one. busy: rows have slots in it."""

    name: str
    last_step: float
    busy: bool


class Pulse(NamedTuple):
    """One look at the page.

    instances: by their labels; none if there was nothing to see, and then `trouble` says why. now: the time of the look
    by the server's clock, or by ours if it doesn't say.
    """

    instances: Mapping[str, Instance]
    now: float
    trouble: str = ""

    def beats(self, step_age: float) -> bool:
        """Tell whether every instance has made a step in the last `step_age` seconds."""
        ages = [self.now - one.last_step for one in self.instances.values()]
        return bool(ages) and all(-CLOCK_SECONDS <= age <= step_age for age in ages)

    def moved(self, before: Pulse) -> bool:
        """Tell whether any instance has made a step since an earlier look; no clock is asked."""
        return any(
            one.last_step > 0 and name in before.instances and one.last_step != before.instances[name].last_step
            for name, one in self.instances.items()
        )

    def hanging(self, before: Pulse, step_age: float) -> list[Instance]:
        """Return the instances whose rows had slots at both looks and no step, neither lately nor between them.

        An instance that is alone isn't one of them: whatever else is known of the model is known of it.
        """
        return [
            one
            for name, one in self.instances.items()
            if len(self.instances) > 1
            and one.busy
            and name in before.instances
            and before.instances[name].busy
            and one.last_step == before.instances[name].last_step
            and self.now - one.last_step > step_age
        ]

    def describe(self) -> str:
        """Say how old the last step is: of several instances, the one whose is the oldest."""
        if not self.instances:
            return f"no metrics ({self.trouble})"
        oldest = min(one.last_step for one in self.instances.values())
        return f"the last step was {self._age(oldest)} ago" if oldest > 0 else "no step yet"

    def beat(self) -> str:
        """Say how old the evidence is: of several instances, the youngest."""
        return f"a step {self._age(max(one.last_step for one in self.instances.values()))} ago"

    def _age(self, last_step: float) -> str:
        age = max(self.now - last_step, 0.0)
        return f"{age:.1f} s" if age < 10 else f"{age:.0f} s"


def look(page: Address | None, model: str) -> Pulse:
    """Read the page; one that isn't there (None), can't be read, or isn't this model's is a Pulse without instances."""
    if page is None:
        return Pulse({}, time.time(), "switched off")
    try:
        answer = exchange(page, "GET", "/metrics", LOOK_SECONDS)
    except NoAnswerError as error:
        return Pulse({}, time.time(), str(error))
    now = time.time() if answer.clock is None else answer.clock
    found: dict[str, dict[str, str]] = {}
    for metric, labels, value in _SERIES.findall(answer.body):
        found.setdefault(labels, {})[metric] = value
    try:
        instances = {
            labels: Instance(named.get("model_instance", model), float(values[LAST_STEP]), _is_some(values))
            for labels, values in found.items()
            if LAST_STEP in values and (named := dict(_LABEL.findall(labels))).get("model") == model
        }
    except ValueError as error:
        return Pulse({}, now, f"{page}: {error}")
    if answer.status != 200 or not instances:
        return Pulse({}, now, f"{page} has no {LAST_STEP} of the model {model}")
    return Pulse(instances, now)


def _is_some(values: Mapping[str, str]) -> bool:
    return float(values.get(SLOTS_IN_USE, "0")) > 0
