"""The passes of a run, recorded while an engine makes them, and repeated by the model alone.

They are repeated in two ways, with the same rows in the same order: through the model runner, without sampling and
texts; and through transformers' forward with a cache at next to no cost, in which all rows of a step have the same
length, so that it needs neither a mask nor indexed writes. The second one contains none of our code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from llama_engine.model.kv_cache import KVCache, KVCacheShape
from llama_engine.model.loader import Checkpoint
from llama_engine.model.model_runner import ModelRunner

_TOKEN = 5


@dataclass(frozen=True)
class Pass:
    """`rows` rows of `width` tokens each from the position `start`; the head over `rows` rows if the width is 0.

    repeat: the same pass by another model runner, given the hidden states for the head.
    """

    rows: int
    start: int
    width: int
    repeat: Callable[[ModelRunner, torch.Tensor], object] = field(compare=False, repr=False)


def _prefill(first: int, prompts: Sequence[Sequence[int]]) -> Pass:
    return Pass(len(prompts), 0, max(map(len, prompts)), lambda model, _: model.prefill(first, prompts))


def _chunk(slot: int, tokens: Sequence[int], start: int) -> Pass:
    return Pass(1, start, len(tokens), lambda model, _: model.prefill_chunk(slot, tokens, start))


def _step(first: int, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> Pass:
    # The engine changes its own in place.
    kept = tokens.clone(), positions.clone()
    return Pass(len(tokens), int(positions.max()), 1, lambda model, _: model.decode(first, *kept, span))


def _head(hidden: torch.Tensor) -> Pass:
    rows = len(hidden)
    return Pass(rows, 0, 0, lambda model, given: model.logits(given[:rows]))


_NOTES: dict[str, Callable[..., Pass]] = {
    "prefill": _prefill,
    "prefill_chunk": _chunk,
    "decode": _step,
    "logits": _head,
}


@contextmanager
def recording() -> Iterator[list[Pass]]:
    """Record every pass of a model runner in this block."""
    passes: list[Pass] = []

    def noting(note: Callable[..., Pass], original: Callable[..., object]) -> Callable[..., object]:
        def noted(model: ModelRunner, *arguments: object) -> object:
            passes.append(note(*arguments))
            return original(model, *arguments)

        return noted

    with ExitStack() as replaced:
        for name, note in _NOTES.items():
            replaced.enter_context(patch.object(ModelRunner, name, noting(note, vars(ModelRunner)[name])))
        yield passes


def through_slots(
    checkpoint: Checkpoint, shape: KVCacheShape, passes: Sequence[Pass], settle: Callable[[], None]
) -> float:
    """Repeat the passes through a new model runner; return the seconds of the passes alone."""
    model = ModelRunner(checkpoint, KVCache(shape, checkpoint.info.device))
    hidden = _hidden(checkpoint, shape.slots)
    return _seconds(passes, lambda one: one.repeat(model, hidden), settle)


def through_forward(
    checkpoint: Checkpoint, shape: KVCacheShape, passes: Sequence[Pass], settle: Callable[[], None]
) -> float:
    """Repeat the passes through transformers' forward alone; return the seconds of the passes."""
    device = checkpoint.info.device
    cache = _EvenCache(shape, device)
    hidden = _hidden(checkpoint, shape.slots)
    tokens = torch.full((shape.slots, shape.max_model_len), _TOKEN, device=device)
    columns = torch.arange(shape.max_model_len, device=device)

    def repeat(one: Pass) -> None:
        if not one.width:
            checkpoint.model.lm_head(hidden[: one.rows])
            return
        end = one.start + one.width
        cache.start = one.start
        positions = columns[one.start : end].expand(one.rows, one.width)
        cache.bind(0, positions, end)
        checkpoint.model.model(
            input_ids=tokens[: one.rows, : one.width], position_ids=positions, past_key_values=cache, use_cache=True
        )

    return _seconds(passes, repeat, settle)


@torch.inference_mode()
def _seconds(passes: Sequence[Pass], repeat: Callable[[Pass], object], settle: Callable[[], None]) -> float:
    seconds = 0.0
    for one in passes:
        settle()
        began = time.perf_counter()
        repeat(one)
        settle()
        seconds += time.perf_counter() - began
    return seconds


def _hidden(checkpoint: Checkpoint, rows: int) -> torch.Tensor:
    info = checkpoint.info
    return torch.ones(rows, checkpoint.config.hidden_size, dtype=info.dtype, device=info.device)


class _EvenCache(KVCache):
    """A KV cache whose rows all have the same position: writing is a copy into a slice."""

    start = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this pass's [rows, heads, width, head dim]; return views of [rows, heads, positions so far, …]."""
        layer = self.slot_layers[layer_idx]
        rows, end = key_states.shape[0], self.start + key_states.shape[2]
        layer.keys[:rows, :, self.start : end] = key_states
        layer.values[:rows, :, self.start : end] = value_states
        return layer.keys[:rows, :, :end], layer.values[:rows, :, :end]
