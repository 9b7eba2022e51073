"""Loads whose requests name LoRA adapters: none, one, or eight in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Literal, NamedTuple

from perf.adapters import NAMES
from perf.checkpoint import TINY_LLAMA, default_checkpoint, random_checkpoint
from perf.load.protocols import Request
from perf.workload import MEAN_OUTPUT, Load

Mix = Literal["none", "one", "eight"]
MIXES: Mapping[Mix, Sequence[str]] = {"none": [""], "one": NAMES[:1], "eight": NAMES}
"""The adapters that a load's requests name in turn."""
MODELS: Mapping[str, tuple[Callable[[], Path], int]] = {
    "small": (default_checkpoint, MEAN_OUTPUT),
    "large": (partial(random_checkpoint, TINY_LLAMA), MEAN_OUTPUT // 2),
}
"""What makes a model's checkpoint, and the mean of its output tokens."""
ROUNDS = 5
USERS = (1, 8, 32)


class LoraLoad(NamedTuple):
    """A closed loop of the other tables' requests. model: of its measurements' keys. mix: the requests' adapters.

    round: servers are compared by what they gave in the same one. mean: output tokens of a request. seconds: none is
    sent later than so long after the warm-up.
    """

    model: str
    mix: Mix
    users: int
    round: int
    mean: int
    seconds: float = 10.0
    perf_analyzer: bool = False

    @property
    def key(self) -> str:
        """Of its measurements, before the server's."""
        return f"lora/{self.model}/{self.mix}/{self.users}/{self.round}"

    def requests(self, checkpoint: Path) -> tuple[list[Request], int]:
        """Return the requests, the same for every server, and how many of them are the warm-up."""
        load, warmup = Load(self.key, "uniform", self.users, 512, self.mean).requests(checkpoint)
        named = zip(load, cycle(MIXES[self.mix]), strict=False)
        return [replace(request, adapter=adapter) for request, adapter in named], warmup
