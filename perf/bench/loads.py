"""Loads: closed loops of the same requests in the same order for every server."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from perf.load.protocols import Request
from perf.workload import MEAN_OUTPUT, Mix, warm_and_measured

SLOTS = 32
"""Slots of every server, and the default number of users."""


class Load(NamedTuple):
    """Prompts of equal length. key: of its measurements, before the server's.

    measured: requests after a warm-up of one per user. mean: output tokens of a request. perf_analyzer: it is the
    generator, over gRPC, instead of ours over HTTP, which streams where the server does.
    """

    key: str
    mix: Mix
    users: int = SLOTS
    measured: int = 64
    mean: int = MEAN_OUTPUT
    perf_analyzer: bool = False

    def requests(self, checkpoint: Path) -> tuple[list[Request], int]:
        """Return the requests, the same for every server, and how many of them are the warm-up."""
        return warm_and_measured(checkpoint, self.mix, self.users, self.measured, self.mean), self.users

    def facts(self) -> dict[str, object]:
        """Return what a measurement says about it."""
        return {"mix": self.mix}


_MIXES: tuple[Mix, ...] = ("uniform", "geometric")
USERS = [
    Load(f"users/{mix}/{users}", mix, users, measured)
    for users, measured in ((SLOTS, 64), (1, 8), (8, 16), (128, 64))
    for mix in _MIXES
]
LARGE = [Load("large/1", "uniform", 1, 4, MEAN_OUTPUT // 2), Load("large/32", "uniform", 32, 32, MEAN_OUTPUT // 2)]
"""For the larger model: fewer requests with half the tokens."""
FORMATS = [Load("formats/1", "uniform", 1, 4), Load("formats/8", "uniform", 8, 16)]
"""For the larger model in the formats of checkpoints."""
