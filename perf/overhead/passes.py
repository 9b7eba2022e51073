"""The passes of a run, recorded while an engine makes them, and repeated by a model runner alone.

The repeated passes are the bare forward: the same rows at the same positions in the same order, over a KV cache of
their own, without scheduling, sampling and texts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
from llama_engine.model.cpu_runner import CpuRunner
from llama_engine.model.kv_cache import KVCacheShape
from llama_engine.model.loader import Checkpoint
from llama_engine.model.model_runner import Chunk, ModelRunner
from llama_engine.model.torch_runner import TorchRunner

RUNNERS: tuple[type[ModelRunner], ...] = (TorchRunner, CpuRunner)
"""Every kind of model runner."""


class Pass(NamedTuple):
    """A call of a model runner's method, over `tokens` tokens in `rows` rows. repeat: the same by another runner."""

    method: str
    rows: int
    tokens: int
    repeat: Callable[[ModelRunner], object]


def _prefill(chunks: Sequence[Chunk]) -> Pass:
    return Pass("prefill", len(chunks), sum(len(chunk.tokens) for chunk in chunks), lambda model: model.prefill(chunks))


def _decode(slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> Pass:
    # The engine changes its own in place.
    kept = slots.clone(), tokens.clone(), positions.clone()
    return Pass("decode", len(tokens), len(tokens), lambda model: model.decode(*kept, span))


def _logits(hidden: torch.Tensor) -> Pass:
    return Pass("logits", len(hidden), len(hidden), lambda model: model.logits(hidden))


_NOTES: dict[str, Callable[..., Pass]] = {"prefill": _prefill, "decode": _decode, "logits": _logits}


@contextmanager
def recording() -> Iterator[list[Pass]]:
    """Record every pass of every model runner in this block."""
    passes: list[Pass] = []

    def noting(note: Callable[..., Pass], original: Callable[..., object]) -> Callable[..., object]:
        def noted(model: ModelRunner, *arguments: object) -> object:
            passes.append(note(*arguments))
            return original(model, *arguments)

        return noted

    with ExitStack() as replaced:
        for runner in RUNNERS:
            for name, note in _NOTES.items():
                replaced.enter_context(patch.object(runner, name, noting(note, vars(runner)[name])))
        yield passes


@torch.inference_mode()
def repeated(
    checkpoint: Checkpoint, shape: KVCacheShape, passes: Sequence[Pass], settle: Callable[[], None]
) -> list[float]:
    """Repeat the passes through a new model runner; return the seconds of each."""
    model = checkpoint.runner(shape)
    seconds = []
    for one in passes:
        settle()
        began = time.perf_counter()
        one.repeat(model)
        settle()
        seconds.append(time.perf_counter() - began)
    return seconds
