"""The passes of a run, recorded while an engine makes them, and repeated by the model alone.

They are repeated in two ways, with the same rows and tokens in the same order: through the model runner, without
sampling and texts; and through transformers' forward with a cache at next to no cost, in which all rows of a step have
the same length, so that it needs neither a mask nor indexed writes. The second one contains none of our code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from llama_engine.model.kv_cache import KVCache, KVCacheShape
from llama_engine.model.loader import Checkpoint
from llama_engine.model.model_runner import ModelRunner

from perf.overhead.stopwatch import replacing

_TOKEN = 5


@dataclass(frozen=True)
class Prompts:
    """Whole prompts of these lengths, prefilled together into the slots from `first`."""

    first: int
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A chunk of a prompt, prefilled into `slot` at the positions from `start`."""

    slot: int
    tokens: int
    start: int


@dataclass(frozen=True)
class Step:
    """A decode step of the slots `first` … `last` − 1; longest: positions in the longest one."""

    first: int
    last: int
    longest: int


@dataclass(frozen=True)
class Head:
    """The head over `rows` rows."""

    rows: int


Pass = Prompts | Chunk | Step | Head


@contextmanager
def recording() -> Iterator[list[Pass]]:
    """Record every pass of a model runner in this block."""
    passes: list[Pass] = []

    def noting(note: Callable[..., Pass]) -> Callable[[Callable[..., object]], Callable[..., object]]:
        def wrap(original: Callable[..., object]) -> Callable[..., object]:
            def noted(model: ModelRunner, *arguments: object) -> object:
                passes.append(note(*arguments))
                return original(model, *arguments)

            return noted

        return wrap

    notes: dict[str, Callable[..., Pass]] = {
        "prefill": lambda first, prompts: Prompts(first, tuple(map(len, prompts))),
        "prefill_chunk": lambda slot, tokens, start: Chunk(slot, len(tokens), start),
        "decode": lambda first, tokens, positions, span: Step(first, first + len(tokens), int(positions.max())),
        "logits": lambda hidden: Head(len(hidden)),
    }
    with ExitStack() as replaced:
        for name, note in notes.items():
            replaced.enter_context(replacing(ModelRunner, name, noting(note)))
        yield passes


@torch.inference_mode()
def through_slots(
    checkpoint: Checkpoint, shape: KVCacheShape, passes: Sequence[Pass], settle: Callable[[], None]
) -> float:
    """Repeat the passes through a new model runner; return the seconds of the passes alone."""
    device = checkpoint.info.device
    model = ModelRunner(checkpoint, KVCache(shape, device))
    hidden = _hidden(checkpoint, shape.slots)
    seconds = 0.0
    for one in passes:
        rows = one.last - one.first if isinstance(one, Step) else 0
        last_tokens = torch.full((rows, 1), _TOKEN, device=device)
        positions = torch.full((rows, 1), one.longest if isinstance(one, Step) else 0, device=device)
        settle()
        began = time.perf_counter()
        match one:
            case Prompts(first, lengths):
                model.prefill(first, [(_TOKEN,) * length for length in lengths])
            case Chunk(slot, tokens, start):
                model.prefill_chunk(slot, (_TOKEN,) * tokens, start)
            case Step(first, _, longest):
                model.decode(first, last_tokens, positions, model.decode_span(longest))
            case Head(count):
                model.logits(hidden[:count])
        settle()
        seconds += time.perf_counter() - began
    return seconds


@torch.inference_mode()
def through_forward(
    checkpoint: Checkpoint, shape: KVCacheShape, passes: Sequence[Pass], settle: Callable[[], None]
) -> float:
    """Repeat the passes through transformers' forward alone; return the seconds of the passes."""
    device = checkpoint.info.device
    cache = _EvenCache(shape, device)
    hidden = _hidden(checkpoint, shape.slots)
    tokens = torch.full((shape.slots, shape.max_model_len), _TOKEN, device=device)
    columns = torch.arange(shape.max_model_len, device=device)
    seconds = 0.0
    for one in passes:
        settle()
        began = time.perf_counter()
        match one:
            case Head(rows):
                checkpoint.model.lm_head(hidden[:rows])
            case _:
                rows, start, width = _extent(one)
                cache.start = start
                positions = columns[start : start + width].expand(rows, width)
                cache.bind(0, positions, start + width)
                checkpoint.model.model(
                    input_ids=tokens[:rows, :width], position_ids=positions, past_key_values=cache, use_cache=True
                )
        settle()
        seconds += time.perf_counter() - began
    return seconds


def _extent(one: Prompts | Chunk | Step) -> tuple[int, int, int]:
    """Return the pass's rows, the position of its first token, and its tokens per row."""
    match one:
        case Prompts(_, lengths):
            return len(lengths), 0, max(lengths)
        case Chunk(_, tokens, start):
            return 1, start, tokens
        case Step(first, last, longest):
            return last - first, longest, 1


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
