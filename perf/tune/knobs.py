"""The settings that are tuned, as one value: a point of the search. Knows neither files nor servers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Batcher:
    """Triton's dynamic batcher. preferred: batch sizes that start at once, ascending, at least one."""

    delay_microseconds: int
    preferred: tuple[int, ...]


@dataclass(frozen=True)
class Knobs:
    """A point of the search.

    batcher: None where the config has no dynamic batching. slots: rows decoded together, which is the config's
    max_batch_size. prefill_tokens: most padded prompt tokens read before a decode step.
    """

    batcher: Batcher | None
    slots: int
    prefill_tokens: int

    def settings(self) -> dict[str, object]:
        """Return the settings by their names in the config, for a result's JSON."""
        return {
            "max_queue_delay_microseconds": None if self.batcher is None else self.batcher.delay_microseconds,
            "preferred_batch_size": None if self.batcher is None else list(self.batcher.preferred),
            "slots": self.slots,
            "prefill_tokens": self.prefill_tokens,
        }

    def describe(self) -> str:
        """Return the settings as a few words."""
        batcher = "no batcher"
        if self.batcher is not None:
            batcher = f"delay {self.batcher.delay_microseconds} us, preferred {sizes(self.batcher.preferred)}"
        return f"{batcher}, slots {self.slots}, prefill {self.prefill_tokens}"

    @property
    def key(self) -> str:
        """The point's name in a result's JSON, without spaces; equal for equal settings only."""
        batcher = "no-batcher"
        if self.batcher is not None:
            batcher = f"delay{self.batcher.delay_microseconds}/preferred{sizes(self.batcher.preferred, '-')}"
        return f"{batcher}/slots{self.slots}/prefill{self.prefill_tokens}"

    def changes(self, other: Knobs) -> int:
        """Return how many settings differ from another point's."""
        mine, theirs = self.settings(), other.settings()
        return sum(mine[name] != theirs[name] for name in mine)


def run_key(knobs: Knobs, run: int) -> str:
    """Return the name of a point's measurement; run: 1, 2, … of it."""
    return f"{knobs.key}/run{run}"


def sizes(preferred: tuple[int, ...], separator: str = " ") -> str:
    """Return preferred sizes as text: "4 8 16"."""
    return separator.join(map(str, preferred))
