"""What a soak has observed, as plain figures: looks at the server while it went, rests in between, and the sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from perf.soak.course import Course
from perf.soak.readings import Readings
from perf.soak.tally import Tally
from perf.soak.vitals import ProcessVitals, ServerVitals
from perf.soak.weather import Phase


@dataclass(frozen=True)
class Sample:
    """One look while the soak goes. seconds: since it began.

    tokens_per_second, answers, p95_ms: since the look before; p95_ms is None where nothing was answered.
    """

    seconds: float
    phase: Phase
    vitals: ServerVitals
    slots_in_use: float
    waiting: float
    pending: float
    tokens_per_second: float
    answers: int
    p95_ms: float | None


@dataclass(frozen=True)
class Rest:
    """A moment at which nobody was to be served any more. levels: what should be 0 then."""

    seconds: float
    levels: dict[str, float]


@dataclass(frozen=True)
class Soaked:
    """A soak, to its end or as far as it came.

    before, after: the metrics when nobody was served; no after where there was nobody left to ask. same_processes: at
    the end as at first. rows_depend: on their batch, as the model itself says of its weights. cut_short: why the soak
    didn't go to its end.
    """

    course: Course
    streams: bool
    seconds: float
    samples: Sequence[Sample]
    rests: Sequence[Rest]
    tally: Tally
    before: Readings
    after: Readings | None
    fixed_text: str
    same_processes: bool
    rows_depend: bool = False
    cut_short: str = ""

    def grown(self, name: str, **labels: str) -> float:
        """Return by how much a metric has grown, all of its series with these labels together.

        Raises ValueError where there is no such metric, or the soak was cut short.
        """
        if self.after is None:
            raise ValueError("nobody was left to be asked at the end")
        return self.after.total(name, **labels) - self.before.total(name, **labels)

    @property
    def second_half(self) -> list[Sample]:
        """The looks after half of the time: what a process needs to warm up is taken by then."""
        return [sample for sample in self.samples if sample.seconds >= self.seconds / 2]


MOST_ROWS = 150
"""In a result's file: a soak of a night has thousands of looks, and a picture has not so many points."""


def rows(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return looks as columns of figures, for a result's file; of very many only as many as a picture shows."""
    step = max(1, -(-len(samples) // MOST_ROWS))
    shown = samples[::step]
    columns: dict[str, list[Any]] = {
        "seconds": [round(sample.seconds, 1) for sample in shown],
        "phase": [sample.phase for sample in shown],
        "shared_memory_mib": [round(sample.vitals.shared_memory_mib, 2) for sample in shown],
        "vram_mib": [sample.vitals.vram_mib for sample in shown],
    }
    for process in ("triton", "model"):
        seen = [getattr(sample.vitals, process) for sample in shown]
        for name in (field.name for field in fields(ProcessVitals)):
            columns[f"{process}_{name}"] = [round(getattr(one, name), 2) for one in seen]
    for name in ("slots_in_use", "waiting", "pending", "tokens_per_second", "answers", "p95_ms"):
        values = [getattr(sample, name) for sample in shown]
        columns[name] = [None if value is None else round(value, 1) for value in values]
    return columns
