"""The sequences that decode: all state per slot, and the step that gives each sequence its next token.

The state is behind `SlotBatch.add` and `remove`: KV cache, last token, position, sampling parameters and histories. The
slots in use are the first ones, so that a decode step reads views.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from llama_engine.isolation import compute_isolated
from llama_engine.model.kv_cache import KVCache, KVCacheShape
from llama_engine.model.model_runner import ModelRunner
from llama_engine.sampling.sampler import FAILED, Sampler, SamplingFeatures, SamplingState, features_of
from llama_engine.sequence import Sequence, names_of

MAX_FAILED_REPLAYS = 3
"""Consecutive failures after which captured steps are no longer replayed."""

_log = logging.getLogger(__name__)


class SlotBatch:
    """The sequences that decode, and the state of their slots. Not thread-safe."""

    def __init__(self, shape: KVCacheShape, vocabulary: int, device: torch.device) -> None:
        """Allocate the state of `shape.slots` slots. vocabulary: number of tokens."""
        self.sequences: list[Sequence] = []
        """The sequence in each slot in use."""
        self.kv_cache = KVCache(shape, device)
        self.sampling = SamplingState(shape.slots, vocabulary, device)
        self.features = SamplingFeatures()
        """Sampling features that any of the sequences asks for."""
        self.tokens = torch.zeros(shape.slots, 1, dtype=torch.long, device=device)
        """The last token of each slot, which its next decode step reads: [slots, 1]."""
        self.positions = torch.zeros(shape.slots, 1, dtype=torch.long, device=device)
        """The position of that token: [slots, 1]."""

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequences: list[Sequence]) -> None:
        """Add sequences whose prompts are cached in the next slots: PREFILL → DECODE.

        Raises what the device raises; the slots are then still free.
        """
        first, last = len(self.sequences), len(self.sequences) + len(sequences)
        lengths = [sequence.num_cached for sequence in sequences]
        self.positions[first:last, 0] = torch.tensor(lengths, device=self.positions.device)
        self.sampling.set(first, [sequence.request for sequence in sequences])
        # After everything that can fail: until here the slots are still free.
        self._replace([*self.sequences, *sequences])
        for sequence in sequences:
            sequence.start_decoding()

    def remove(self, slot: int) -> None:
        """Free a slot: the sequence in the last slot moves into it.

        Raises what the device raises. The list of sequences changes last: if a copy fails, every other sequence is
        still complete in its slot.
        """
        last = len(self.sequences) - 1
        remaining = self.sequences[:last]
        if slot != last:
            moving = remaining[slot] = self.sequences[last]
            self.kv_cache.copy(last, slot, moving.num_cached)
            self.sampling.copy(last, slot)
            self.tokens[slot] = self.tokens[last]
            self.positions[slot] = self.positions[last]
        self._replace(remaining)

    def clear(self) -> list[Sequence]:
        """Free all slots; return the sequences that were in them."""
        sequences = self.sequences
        self._replace([])
        return sequences

    def advance(self, decoded: int, tokens: torch.Tensor) -> None:
        """Store the sampled tokens, [rows], FAILED included; the first `decoded` slots have cached one position."""
        self.positions[:decoded] += 1
        self.tokens[: len(tokens), 0] = tokens

    def _replace(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.features = features_of(sequence.request for sequence in sequences)


class CapturedSteps(Protocol):
    """Decode steps that were captured as CUDA graphs."""

    def step(self, decoding: int, prefilled: list[torch.Tensor]) -> torch.Tensor:
        """Replay a step: what `DecodeStep.run` specifies. If it raises, nothing has been stored."""


class DecodeStep:
    """Computes the next token of every slot in use, by replayed CUDA graphs where there are any. Not thread-safe.

    The first `decoding` slots run a forward pass; the others have just been prefilled, and their last hidden states are
    passed in.
    """

    def __init__(
        self, model: ModelRunner, sampler: Sampler, batch: SlotBatch, on_error: Callable[[Exception, str], bool]
    ) -> None:
        """on_error: logs a failed computation; returns whether it exhausted the device's memory."""
        self._model, self._sampler, self._batch = model, sampler, batch
        self._on_error = on_error
        self.graphs: CapturedSteps | None = None
        """Captured steps; None launches every kernel."""
        self._failed_replays = 0

    def run(self, decoding: int, prefilled: list[torch.Tensor]) -> torch.Tensor:
        """Return the next token of every slot in use, [rows], and store it as the input of the slot's next step.

        prefilled: hidden states, [rows, hidden] in all, of the slots behind the first `decoding`. FAILED stands for a
        token that can't be computed: the sequence has its result, or its logits were not finite.
        """
        tokens = self._replay(decoding, prefilled)
        if tokens is None:
            tokens = self._launch(decoding, prefilled)
            self._batch.advance(decoding, tokens)
        # A replay advances the tensors itself.
        for sequence in self._batch.sequences[:decoding]:
            sequence.num_cached += 1
        return tokens

    def _replay(self, decoding: int, prefilled: list[torch.Tensor]) -> torch.Tensor | None:
        """Replay the captured step; None if there is none or it fails."""
        if self.graphs is None:
            return None
        try:
            tokens = self.graphs.step(decoding, prefilled)
        except Exception as error:  # noqa: BLE001 - launching finds the sequence that fails, and spares the others
            self._on_error(error, f"replaying a step over {names_of(self._batch.sequences)}")
            self._failed_replays += 1
            if self._failed_replays == MAX_FAILED_REPLAYS:
                _log.error("%d consecutive replays failed; CUDA graphs are no longer used", MAX_FAILED_REPLAYS)
                self.graphs = None
            return None
        self._failed_replays = 0
        return tokens

    def _launch(self, decoding: int, prefilled: list[torch.Tensor]) -> torch.Tensor:
        """Compute the tokens of all slots in use, [rows]; where that fails, of halves of them."""
        batch = self._batch
        slots = {sequence: slot for slot, sequence in enumerate(batch.sequences)}

        def compute(part: list[Sequence]) -> torch.Tensor:
            first = slots[part[0]]
            last = first + len(part)
            hidden = []
            if first < decoding:
                rows = slice(first, min(last, decoding))
                span = self._model.decode_span(max(sequence.num_cached for sequence in batch.sequences[rows]))
                hidden.append(self._model.decode(first, batch.tokens[rows], batch.positions[rows], span))
            if last > decoding:
                hidden.append(torch.cat(prefilled)[max(first - decoding, 0) : last - decoding])
            logits = self._model.logits(torch.cat(hidden))
            return self._sampler.sample(logits, first, part, batch.features)

        def on_error(part: list[Sequence], error: Exception) -> bool:
            return self._on_error(error, f"the next tokens of {names_of(part)}")

        def on_failed(_: Sequence) -> torch.Tensor:
            return torch.tensor([FAILED], device=batch.tokens.device)

        return torch.cat(compute_isolated(batch.sequences, compute, on_error, on_failed))
