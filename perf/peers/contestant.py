"""A server that takes part: what it is called, and how it is started. Knows none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from perf.load.protocols import Target
from perf.roofline.rates import Weights


class NotRunError(Exception):
    """A server can't be measured here; `str()` is the reason, in one line, for the results."""


@dataclass(frozen=True)
class Started:
    """A server that has answered.

    command: as `peers.process.shown` shows it. settings: with what it was started, and what it says of itself. pid: its
    first process; the others are that one's descendants. weights_mib: of the weights as it keeps them.
    """

    target: Target
    command: str
    settings: Mapping[str, object]
    pid: int
    weights_mib: float

    def describe(self) -> str:
        """Return command and settings, a line each."""
        return "\n".join([self.command, *(f"  {name}: {value}" for name, value in self.settings.items())])


Start = Callable[[Path, int], AbstractContextManager[Started]]
"""Starts a fresh server of the checkpoint at that path with so many threads for its matrix products; gone on leaving.
Raises NotRunError."""


@dataclass(frozen=True)
class Contestant:
    """key: in results. family: who made it. weights: as they are kept."""

    key: str
    title: str
    family: Literal["ours", "peer"]
    weights: Weights
    start: Start

    def to_json(self) -> dict[str, object]:
        """Return what every measurement of it begins with."""
        return {"server": self.key, "title": self.title, "family": self.family, "weights": self.weights.upper()}
