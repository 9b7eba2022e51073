"""The course of a run: one task after the other, each once, within the budget, and what it found written at once.

A task that fails is in the results with its reason, and the others go on: a run of an hour isn't lost to one server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llama_engine.errors import one_line

from perf.setting.budget import Budget
from perf.setting.results import Results
from perf.setting.stolen import Stolen

Measurement = Mapping[str, object]


class NoTimeError(Exception):
    """The least that this task can do takes longer than what is left; `str()` says both."""


@dataclass(frozen=True)
class Course:
    """What every part of a run gets: where results go, and how much time there is."""

    results: Results
    budget: Budget

    def measure(self, key: str, name: Mapping[str, object], task: Callable[[], Measurement]) -> None:
        """Run the task unless its result is there; name: "server", "title", … for a task that can't be run.

        What it found gets the share of the processors' time that was stolen meanwhile.
        """
        if self.has(key):
            self.budget.say(f"{key}: there already")
            return
        self.budget.say(f"{key} …")
        stolen = Stolen()
        try:
            found = task()
            found = {**found, "stolen_share": round(stolen.share(), 4)}
        except Exception as error:  # noqa: BLE001 - many libraries have a say; it is in the results, and printed
            found = {**name, "not_run": reason(error)}
        self.note(key, found)

    def refuse_without(self, seconds: float) -> None:
        """Raise NoTimeError unless so many seconds are left."""
        left = max(self.budget.left, 0.0)
        if seconds > left:
            raise NoTimeError(
                f"the least that can be done takes about {seconds:.0f} s; {left:.0f} s are left of --budget"
            )

    def has(self, key: str) -> bool:
        """Say whether that was measured; what couldn't be run is tried again."""
        return self.results.has(key) and "not_run" not in self.results.measurements[key]

    def note(self, key: str, found: Measurement) -> None:
        """Write a measurement and say in a line what it came to: its own line `in_short`, if it has one."""
        self.results.add(key, found)
        self.budget.say(f"{key}: {_in_short(found)}")


def reason(error: Exception) -> str:
    """Return in a line why something couldn't be run."""
    return str(error) if isinstance(error, NoTimeError) else one_line(error)


def _in_short(found: Measurement) -> str:
    if "not_run" in found:
        return f"not run: {found['not_run']}"
    if "in_short" in found:
        return str(found["in_short"])
    latency = found.get("latency_ms")
    p95 = f", p95 {latency['p95'] / 1e3:,.1f} s" if isinstance(latency, Mapping) else ""
    return f"{found.get('tokens_per_second')} tokens/s{p95}, {found.get('errors')} errors"
