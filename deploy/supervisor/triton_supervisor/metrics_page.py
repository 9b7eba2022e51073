"""What Triton's metrics page says of the model: its last steps, what runs and what waits."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from triton_supervisor.triton_http import Address, NoAnswerError, exchange

METRICS_S = 2.0
"""Timeout of the page; a thread of tritonserver that does nothing else serves it."""
CLOCK_SKEW_S = 1.0
"""Tolerated clock skew. Beyond it the clocks disagree, and a step has no usable age."""
LAST_STEP = "llama_last_step_timestamp_seconds"
SLOTS_IN_USE = "llama_slots_in_use"
WAITING = "llama_waiting_rows"
PENDING = "nv_inference_pending_request_count"
"""Triton's own: requests in its queue."""

_SERIES = re.compile(r"^(\w+)\{(.*)\} ([-+]?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Load(NamedTuple):
    """Requests that a page shows. queued: in Triton's queues. running: sequences with a slot. waiting: without one."""

    queued: float
    running: float
    waiting: float

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not any(self)


class Instance(NamedTuple):
    """One process of the model. last_step: seconds since 1970, 0 before the first one. busy: it has slots in use."""

    last_step: float
    busy: bool


class Steps(NamedTuple):
    """The last step of each instance at one moment.

    A process that died leaves its last values on the page, so a step is evidence only while it is recent or if it came
    since an earlier look.

    instances: by their labels; empty if the page has none, and `trouble` then says why. now: the server's time if the
    page states it, else ours. queued: whether requests are in Triton's queue.
    """

    instances: Mapping[str, Instance]
    now: float
    trouble: str = ""
    queued: bool = False

    def requests_wait(self) -> bool:
        """Return whether requests are in Triton's queue or in slots: a model that works makes a step for them."""
        return self.queued or any(instance.busy for instance in self.instances.values())

    def recent(self, step_age: float) -> bool:
        """Return whether every instance made a step in the last `step_age` seconds."""
        ages = [self.now - instance.last_step for instance in self.instances.values()]
        return bool(ages) and all(-CLOCK_SKEW_S <= age <= step_age for age in ages)

    def advanced(self, before: Steps) -> bool:
        """Return whether any instance made a step since an earlier look; independent of clocks."""
        return any(
            instance.last_step > 0
            and label in before.instances
            and instance.last_step != before.instances[label].last_step
            for label, instance in self.instances.items()
        )

    def describe_oldest(self) -> str:
        """Return the age of the last step, of the instance where it is oldest."""
        if not self.instances:
            return f"no metrics ({self.trouble})"
        oldest = min(instance.last_step for instance in self.instances.values())
        return f"the last step was {self._age(oldest)} ago" if oldest > 0 else "no step yet"

    def describe_youngest(self) -> str:
        """Return the age of the most recent step of any instance."""
        return f"a step {self._age(max(instance.last_step for instance in self.instances.values()))} ago"

    def _age(self, last_step: float) -> str:
        age = max(self.now - last_step, 0.0)
        return f"{age:.1f} s" if age < 10 else f"{age:.0f} s"


def series(page: str) -> Iterator[tuple[str, dict[str, str], str, float]]:
    """Yield each series of a metrics page: all labels as they stand, by name, the metric and its value."""
    for metric, labels, value in _SERIES.findall(page):
        yield labels, dict(_LABEL.findall(labels)), metric, float(value)


def read_steps(address: Address | None, model: str) -> Steps:
    """Read the metrics page; without one (None), or if it isn't this model's, the result has no instances."""
    if address is None:
        return Steps({}, time.time(), "switched off")
    try:
        response = exchange(address, "GET", "/metrics", METRICS_S)
    except NoAnswerError as error:
        return Steps({}, time.time(), str(error))
    now = time.time() if response.clock is None else response.clock
    found = [row for row in series(response.body) if row[1].get("model") == model]
    busy = {labels for labels, _, metric, value in found if metric == SLOTS_IN_USE and value > 0}
    instances = {labels: Instance(value, labels in busy) for labels, _, metric, value in found if metric == LAST_STEP}
    if response.status != 200 or not instances:
        return Steps({}, now, f"{address} has no {LAST_STEP} of the model {model}")
    queued = any(value > 0 for _, _, metric, value in found if metric == PENDING)
    return Steps(instances, now, queued=queued)


def read_load(address: Address) -> Load | None:
    """Return what waits and runs in all models; None if the page can't be read."""
    try:
        response = exchange(address, "GET", "/metrics", METRICS_S)
    except NoAnswerError:
        return None
    if response.status != 200:
        return None
    sums = dict.fromkeys((PENDING, SLOTS_IN_USE, WAITING), 0.0)
    for _, _, metric, value in series(response.body):
        if metric in sums:
            sums[metric] += value
    return Load(*sums.values())
