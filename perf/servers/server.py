"""A server under test: its name in the results, and how to start it."""

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
class Running:
    """A server that has answered.

    command: as `servers.process.shown` formats it. settings: given to it, and reported by it. pid: its first process,
    the ancestor of the others. weights_mib: of the weights in its format.
    """

    target: Target
    command: str
    settings: Mapping[str, object]
    pid: int
    weights_mib: float

    def describe(self) -> str:
        """Return command and settings, a line each."""
        return "\n".join([self.command, *(f"  {name}: {value}" for name, value in self.settings.items())])


Start = Callable[[Path, int], AbstractContextManager[Running]]
"""Starts a fresh server of the checkpoint at that path with that number of threads for its matrix products; it is
stopped on leaving. Raises NotRunError."""


@dataclass(frozen=True)
class Server:
    """key: in results. family: ours, or a baseline ("peer" in results). weights: their format."""

    key: str
    title: str
    family: Literal["ours", "peer"]
    weights: Weights
    start: Start

    def to_json(self) -> dict[str, object]:
        """Return the fields that every measurement of it begins with."""
        return {"server": self.key, "title": self.title, "family": self.family, "weights": self.weights.upper()}
