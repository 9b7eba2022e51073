"""A subject as a server of its own, looked at before it is measured: is it really what it is called?

Triton falls back silently to another config, and a setting in the environment beats the config: `setting.read_back`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from triton_local.server import LocalTriton
from triton_local.supervised import Supervised

from perf.article.subjects import Subject
from perf.roofline.rates import Weights
from perf.servers.triton import ReadBack, read_back

_READY_TIMEOUT_S = 900.0

_STOCK = r"(stock kernels|on the CPU), launched"
_QUICK: Mapping[Weights, str] = {
    "int8": r"fused 8-bit product and attention, replayed as \d+ CUDA graphs",
    "fp16": r"fused attention, replayed as \d+ CUDA graphs",
}
"""What the model says of steps that are computed as quickly as it can."""


class MismatchError(Exception):
    """The server that runs isn't the subject that was to be measured; `str()` says where they differ."""


@dataclass(frozen=True)
class Served:
    """A subject that runs, and what it says of itself. threads: for its matrix products, on a CPU."""

    subject: Subject
    server: LocalTriton
    checkpoint: Path
    threads: int
    runs: ReadBack

    def settings(self) -> dict[str, object]:
        """Return what it runs with, as it was read back, for a result's file."""
        return {
            "variant": self.subject.variant,
            "environment": {"OMP_NUM_THREADS": str(self.threads), **self.subject.environment},
            "checkpoint": self.checkpoint.name,
            **self.runs.to_json(),
        }


@contextmanager
def serving(subject: Subject, checkpoint: Path, threads: int, left: float = _READY_TIMEOUT_S) -> Iterator[Served]:
    """Run a fresh server of the subject, checked, for as long as the block lasts.

    left: seconds that its start may take, if that is less than what is given to every start.

    Raises a LauncherError if it doesn't start, MismatchError or UnknownLogError if it isn't what it should be.
    """
    environment = {"OMP_NUM_THREADS": str(threads), **subject.environment}
    server = LocalTriton(
        variant=subject.variant,
        model=str(checkpoint),
        environment=environment,
        ready_timeout=min(left, _READY_TIMEOUT_S),
        # Nobody but the load may ask the model.
        supervised=Supervised(stuck_after=None),
    )
    with server:
        runs = read_back(server)
        check(subject, runs)
        yield Served(subject, server, checkpoint, threads, runs)


def check(subject: Subject, runs: ReadBack) -> None:
    """Raise MismatchError where the server that runs differs from the subject."""
    config, facts = runs.config, runs.loaded
    # In INT8 the head stays as it is, so there are linear layers of two kinds.
    kinds = {subject.linears, facts.dtype} if subject.weights == "int8" else {subject.linears}
    expected: dict[str, tuple[object, object]] = {
        "max_batch_size": (subject.max_batch_size, config.max_batch_size),
        "dynamic_batching": (subject.dynamic_batching, config.dynamic_batching),
        "decoupled": (False, config.decoupled),
        "scheduling": (subject.scheduling, facts.settings.get("scheduling")),
        "max_model_len": (
            subject.environment.get("LLAMA_MAX_MODEL_LEN", "None"),
            facts.settings.get("max_model_len", "None"),
        ),
        "the dtypes of linear layers": (sorted(kinds), sorted(facts.linears)),
    }
    wrong = [f"{name} is {found}, not {wanted}" for name, (wanted, found) in expected.items() if wanted != found]
    # What is asked for and can't be done falls back, with a line in the log: a setting alone says nothing.
    steps = re.fullmatch(_QUICK[subject.weights] if subject.quick else _STOCK, facts.steps)
    if steps is None:
        wrong.append(f"the decode steps are {facts.steps}, not {'quick' if subject.quick else 'stock'} ones")
    if wrong:
        raise MismatchError(f"{subject.key} is to be measured, but of the server that runs {'; '.join(wrong)}")
