"""The course of a run: task after task, each once, within a time budget, each result written at once.

A task that fails is recorded with its reason and the run continues: one server can't spoil a run of an hour.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llama_engine.errors import one_line

from perf.environment import StealTime
from perf.results_file import Results

Measurement = Mapping[str, object]


class NoTimeError(Exception):
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
        """Run the task unless its result exists; name: the entry's fields if the task fails ("server", "title", …).

        The measurement also gets the steal time during the task.
        """
        if self.has(key):
            self.budget.say(f"{key}: there already")
            return
        self.budget.say(f"{key} …")
        steal = StealTime()
        try:
            found = task()
            found = {**found, "stolen_share": round(steal.share(), 4)}
        except Exception as error:  # noqa: BLE001 - any library may raise; the reason is recorded and printed
            found = {**name, "not_run": reason(error)}
        self.note(key, found)

    def refuse_without(self, seconds: float) -> None:
        """Raise NoTimeError unless that many seconds are left."""
        left = max(self.budget.left, 0.0)
        if seconds > left:
            raise NoTimeError(f"the smallest measurement takes {seconds:.0f} s; {left:.0f} s are left of --budget")

    def has(self, key: str) -> bool:
        """Return whether that is measured already; a task that could not run is tried again."""
        return self.results.has(key) and "not_run" not in self.results.measurements[key]

    def note(self, key: str, found: Measurement) -> None:
        """Write a measurement and print it in a line: its own `in_short`, if it has one."""
        self.results.add(key, found)
        self.budget.say(f"{key}: {_in_short(found)}")


def reason(error: Exception) -> str:
    """Return in a line why something could not run."""
    return str(error) if isinstance(error, NoTimeError) else one_line(error)


def _in_short(found: Measurement) -> str:
    if "not_run" in found:
        return f"not run: {found['not_run']}"
    if "in_short" in found:
        return str(found["in_short"])
    latency = found.get("latency_ms")
    p95 = f", p95 {latency['p95'] / 1e3:,.1f} s" if isinstance(latency, Mapping) else ""
    return f"{found.get('tokens_per_second')} tokens/s{p95}, {found.get('errors')} errors"
