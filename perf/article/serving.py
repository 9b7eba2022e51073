"""A subject as a server of its own, looked at before it is measured: is it really what it is called?

Triton falls back silently to another config, and a setting in the environment beats the config. So the config is read
back from the server, and settings and weights from the model's own lines in its log.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from triton_llama.status import ModelConfig, read_config
from triton_local.repository import MODEL_NAME
from triton_local.server import LocalTriton

from article import loaded
from article.loaded import Loaded
from article.subjects import Subject

_READY_TIMEOUT_S = 900.0
_ASK_TIMEOUT_S = 30.0


class MismatchError(Exception):
    """The server that runs isn't the subject that was to be measured; `str()` says where they differ."""


@dataclass(frozen=True)
class Served:
    """A subject that runs, and what it says of itself. threads: for its matrix products, on a CPU."""

    subject: Subject
    server: LocalTriton
    checkpoint: Path
    threads: int
    config: ModelConfig
    loaded: Loaded

    def settings(self) -> dict[str, object]:
        """Return what it runs with, as it was read back, for a result's file."""
        return {
            "variant": self.subject.variant,
            "environment": {"OMP_NUM_THREADS": str(self.threads), **self.subject.environment},
            "checkpoint": self.checkpoint.name,
            "config": {
                "max_batch_size": self.config.max_batch_size,
                "dynamic_batching": self.config.dynamic_batching,
                "preferred_batch_sizes": list(self.config.preferred_batch_sizes),
                "max_queue_delay_microseconds": self.config.max_queue_delay_microseconds,
                "parameters": dict(self.config.parameters),
            },
            "model_settings": dict(self.loaded.settings),
            "loaded": self.loaded.line,
        }


@contextmanager
def serving(subject: Subject, checkpoint: Path, threads: int) -> Iterator[Served]:
    """Run a fresh server of the subject, checked, for as long as the block lasts.

    Raises a LauncherError if it doesn't start, MismatchError or UnknownLogError if it isn't what it should be.
    """
    environment = {"OMP_NUM_THREADS": str(threads), **subject.environment}
    server = LocalTriton(
        variant=subject.variant, model=str(checkpoint), environment=environment, ready_timeout=_READY_TIMEOUT_S
    )
    with server:
        config, facts = read_back(server)
        check(subject, config, facts)
        yield Served(subject, server, checkpoint, threads, config, facts)


def read_back(server: LocalTriton) -> tuple[ModelConfig, Loaded]:
    """Return the config that the server runs with, and what the model in it has loaded."""
    url = f"http://{server.http_url}/v2/models/{MODEL_NAME}/config"
    with urllib.request.urlopen(url, timeout=_ASK_TIMEOUT_S) as response:
        return read_config(json.load(response)), loaded.read(server.log_text())


def check(subject: Subject, config: ModelConfig, facts: Loaded) -> None:
    """Raise MismatchError where the server that runs differs from the subject."""
    # In INT8 the head stays as it is, so there are linear layers of two kinds.
    kinds = {subject.linears, facts.dtype} if subject.weights == "int8" else {subject.linears}
    expected: dict[str, tuple[object, object]] = {
        "max_batch_size": (subject.max_batch_size, config.max_batch_size),
        "dynamic_batching": (subject.dynamic_batching, config.dynamic_batching),
        "decoupled": (False, config.decoupled),
        "scheduling": (subject.scheduling, facts.settings.get("scheduling")),
        "the dtypes of linear layers": (sorted(kinds), sorted(facts.linears)),
    }
    wrong = [f"{name} is {found}, not {wanted}" for name, (wanted, found) in expected.items() if wanted != found]
    if wrong:
        raise MismatchError(f"{subject.key} is to be measured, but of the server that runs {'; '.join(wrong)}")
