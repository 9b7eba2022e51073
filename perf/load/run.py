"""What happened to all requests of a load: those of the warm-up, those that are measured, and the time they took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from perf.load.arrivals import Closed, Poisson
from perf.load.records import Record
from perf.setting.window import Window


@dataclass(frozen=True)
class Run:
    """records: of every request, in their order. warmup: so many of them come first and aren't measured.

    Iterating goes over the measured ones, and its length is their number.
    """

    arrivals: Closed | Poisson
    records: tuple[Record, ...]
    warmup: int

    def __iter__(self) -> Iterator[Record]:
        return iter(self.measured)

    def __len__(self) -> int:
        return len(self.measured)

    @property
    def measured(self) -> tuple[Record, ...]:
        """The requests after the warm-up."""
        return self.records[self.warmup :]

    @property
    def answered(self) -> list[Record]:
        """Those without an error, of the warm-up too."""
        return [record for record in self.records if not record.error]

    @property
    def whole(self) -> Window:
        """From the first request's scheduled moment to the last answer, warm-up included.

        Raises ValueError if nothing was answered.
        """
        return span(self.records)


def span(records: tuple[Record, ...]) -> Window:
    """Return the time from the first one's scheduled moment to the last answer. Raises ValueError without an answer."""
    ends = [record.last_token for record in records if not record.error and record.last_token is not None]
    if not ends:
        raise ValueError(f"none of {len(records)} requests was answered")
    return Window(min(record.scheduled for record in records), max(ends))
