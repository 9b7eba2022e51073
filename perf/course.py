"""The course of a run: task after task, each once, within a time budget, each result written at once.

A task that fails is recorded with its reason and the run continues: one server can't spoil a run of an hour.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from llama_engine.errors import one_line

from perf.environment import StealTime
from perf.results_file import Results

Measurement = Mapping[str, object]
Started = TypeVar("Started")
START_S = 30.0
"""With less time left no server is started."""


class SkippedError(Exception):
    """A load is not measured; `str()` is the reason. The next one follows on the same server."""


class NoTimeError(SkippedError):
    """The smallest measurement takes longer than the time left; `str()` gives both."""


class Budget:
    """A run's seconds, counted from when this is created."""

    def __init__(self, seconds: float) -> None:
        self._began = time.monotonic()
        self.seconds = seconds

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds until the end; negative once it is over."""
        return self.seconds - self.spent

    def say(self, message: str) -> None:
        """Print a line of progress with the time spent and the budget."""
        print(f"[{self.spent / 60:4.1f} of {self.seconds / 60:.0f} min] {message}", flush=True)


@dataclass(frozen=True)
class Course:
    """What every part of a run shares: the results and the budget."""

    results: Results
    budget: Budget

    def measure(self, key: str, name: Mapping[str, object], task: Callable[[], Measurement]) -> None:
        """Run the task; name: the entry's fields if the task fails ("server", "title", …).

        The measurement also gets the steal time during the task.
        """

        def timed(_: None) -> Measurement:
            steal = StealTime()
            measurement = task()
            return {**measurement, "stolen_share": round(steal.share(), 4)}

        self.measure_on_one(name, {key: timed}, nullcontext, min_seconds=0.0)

    def measure_on_one(
        self,
        name: Mapping[str, object],
        loads: Mapping[str, Callable[[Started], Measurement]],
        start: Callable[[], AbstractContextManager[Started]],
        min_seconds: float = START_S,
    ) -> None:
        """Start a server, apply the loads, stop it; every load has an entry afterwards.

        What ends the server's measurements is the reason of all loads that are left: it can't run, or it has not
        answered a load in time and may still be computing it. min_seconds: without them it is not started.
        """
        left = dict(loads)
        try:
            self.refuse_without(min_seconds)
            with start() as started:
                for key, load in [*left.items()]:
                    self.budget.say(f"{key} …")
                    try:
                        measurement = load(started)
                    except SkippedError as error:
                        measurement = {**name, "not_run": reason(error)}
                    self.note(key, measurement)
                    del left[key]
                    if measurement.get("unanswered"):
                        raise RuntimeError(
                            f"{measurement['unanswered']} requests of the last load weren't answered in time"
                        )
        except Exception as error:  # noqa: BLE001 - any library may raise; the reason is recorded and printed
            for key in left:
                self.note(key, {**name, "not_run": reason(error)})
            if not left:
                self.budget.say(f"after the last load: {reason(error)}")

    def refuse_without(self, seconds: float) -> None:
        """Raise NoTimeError unless that many seconds are left."""
        left = max(self.budget.left, 0.0)
        if seconds > left:
            raise NoTimeError(f"the smallest measurement takes {seconds:.0f} s; {left:.0f} s are left of --budget")

    def note(self, key: str, measurement: Measurement) -> None:
        """Write a measurement and print it in a line."""
        self.results.add(key, measurement)
        latency = measurement.get("latency_ms")
        p95 = f", p95 {latency['p95'] / 1e3:,.1f} s" if isinstance(latency, Mapping) else ""
        line = f"{measurement.get('tokens_per_second')} tokens/s{p95}, {measurement.get('errors')} errors"
        if "not_run" in measurement:
            line = f"not run: {measurement['not_run']}"
        self.budget.say(f"{key}: {line}")


def reason(error: Exception) -> str:
    """Return in a line why something could not run."""
    return str(error) if isinstance(error, NoTimeError) else one_line(error)
