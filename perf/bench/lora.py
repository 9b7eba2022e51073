"""Loads whose requests name LoRA adapters: none, one, or eight in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path

from perf.adapters import NAMES
from perf.checkpoint import TINY_LLAMA, default_checkpoint, random_checkpoint
from perf.load.protocols import Request
from perf.load.workload import MEAN_OUTPUT, Load, passages
from perf.lora_report import AdapterMix

MIXES: Mapping[AdapterMix, Sequence[str]] = {"none": [""], "one": NAMES[:1], "eight": NAMES}
"""The adapters that a load's requests name in turn."""
MODELS: Mapping[str, tuple[Callable[[], Path], int]] = {
    "small": (default_checkpoint, MEAN_OUTPUT),
    "large": (partial(random_checkpoint, TINY_LLAMA), MEAN_OUTPUT // 2),
}
"""What makes a model's checkpoint, and the mean of its output tokens."""
ROUNDS = 5
USERS = (1, 8, 32)
SECONDS = 10.0


def load(model: str, mix: AdapterMix, users: int, number: int, mean: int) -> Load:
    """Return a load of the other tables' requests. number: of the round. mean: output tokens of a request."""
    key = f"lora/{model}/{mix}/{users}/{number}"

    def named(checkpoint: Path) -> tuple[list[Request], int]:
        requests, warmup = passages(key, "uniform", users, 512, mean).requests(checkpoint)
        adapters = zip(requests, cycle(MIXES[mix]), strict=False)
        return [replace(request, adapter=adapter) for request, adapter in adapters], warmup

    return Load(key, mix, users, named, SECONDS, round=number)
