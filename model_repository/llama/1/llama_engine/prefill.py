"""Prefill: which prompts are computed next, how many in one pass, and what happens if that fails.

Prompts are computed in order of arrival, one pass before each decode step and at most `budget` padded tokens in it,
which bounds how long decoding sequences wait. Prompts that fit are computed together, straight into the next slots. A
longer one is computed in chunks in the last slot, which is free for it (a sequence counts as soon as it is added), and
moves to the next slot when it is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from llama_engine.isolation import compute_isolated
from llama_engine.model.model_runner import ModelRunner
from llama_engine.sequence import Sequence, names_of
from llama_engine.slot_batch import SlotBatch


@dataclass
class Prefilled:
    """The outcome of a prefill pass.

    sequences: whose prompts are cached in the next slots, in order. hidden: hidden states of their last tokens,
    [rows, hidden] in all. tokens: prompt tokens computed, padding included. failed: sequences that failed alone.
    """

    sequences: list[Sequence] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    tokens: int = 0
    failed: list[Sequence] = field(default_factory=list)


class Prefill:
    """The sequences whose prompts are not cached yet."""

    def __init__(
        self, model: ModelRunner, batch: SlotBatch, budget: int, on_error: Callable[[Exception, str], bool]
    ) -> None:
        """budget: padded tokens per pass. on_error: logs a failed pass; returns whether it exhausted the memory."""
        self._model = model
        self._batch = batch
        self._last_slot = batch.kv_cache.shape.slots - 1
        self._budget = budget
        self._on_error = on_error
        self._queue: deque[Sequence] = deque()
        # The sequence whose prompt is partly cached, in the last slot.
        self._partial: Sequence | None = None
        # The sequences of the last pass, until they are committed.
        self._computing: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._queue) + (self._partial is not None)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._queue.append(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Remove a sequence; return whether it was here."""
        if sequence is self._partial:
            self._partial = None
        elif sequence in self._queue:
            self._queue.remove(sequence)
        else:
            return False
        return True

    def clear(self) -> list[Sequence]:
        """Remove and return all sequences."""
        partial = [] if self._partial is None else [self._partial]
        sequences = dict.fromkeys([*partial, *self._computing, *self._queue])
        self._queue.clear()
        self._computing = []
        self._partial = None
        return list(sequences)

    def step(self) -> Prefilled:
        """Run one pass over the next prompts, if there are any; complete ones are cached in the next free slots."""
        prefilled = Prefilled()
        if self._partial is None and self._queue:
            if self._queue[0].num_uncached <= self._budget:
                self._computing = self._next_group()
                self._prefill_group(self._computing, prefilled)
                return prefilled
            self._partial = self._queue.popleft()
        if self._partial is not None:
            self._computing = [self._partial]
            self._prefill_chunk(self._partial, prefilled)
        return prefilled

    def commit(self) -> None:
        """Forget the sequences of the last pass: they are in the batch, finished, or partly cached."""
        self._computing = []

    def _next_group(self) -> list[Sequence]:
        """Take the sequences that are computed together: in order, while their padded prompts fit the budget."""
        group: list[Sequence] = []
        width = 0
        while self._queue:
            width = max(width, self._queue[0].num_uncached)
            if width * (len(group) + 1) > self._budget:
                break
            group.append(self._queue.popleft())
        return group

    def _prefill_group(self, group: list[Sequence], prefilled: Prefilled) -> None:
        """Compute whole prompts. Prompts that fail together are computed in halves, and fill the slots in order."""

        def compute(part: list[Sequence]) -> None:
            prompts = [sequence.request.prompt_tokens for sequence in part]
            prefilled.tokens += _width(part) * len(part)
            hidden = self._model.prefill(self._next_slot(prefilled), prompts)
            for sequence, prompt in zip(part, prompts, strict=True):
                sequence.num_cached = len(prompt)
            prefilled.sequences += part
            prefilled.hidden.append(hidden)

        def on_error(part: list[Sequence], error: Exception) -> bool:
            exhausted = self._on_error(error, f"prefill of {names_of(part)}, of up to {_width(part)} tokens,")
            first = self._next_slot(prefilled)
            self._batch.kv_cache.zero(first, first + len(part))
            return exhausted

        compute_isolated(group, compute, on_error, prefilled.failed.append)

    def _prefill_chunk(self, sequence: Sequence, prefilled: Prefilled) -> None:
        """Compute the next chunk of a prompt that exceeds the budget."""
        slot = self._last_slot
        chunk = sequence.request.prompt_tokens[sequence.num_cached : sequence.num_cached + self._budget]
        prefilled.tokens = len(chunk)

        def compute(_: list[Sequence]) -> None:
            hidden = self._model.prefill_chunk(slot, chunk, sequence.num_cached)
            sequence.num_cached += len(chunk)
            if sequence.num_uncached:
                return
            if self._next_slot(prefilled) != slot:
                self._batch.kv_cache.copy(slot, self._next_slot(prefilled), sequence.num_cached)
            self._partial = None
            prefilled.sequences.append(sequence)
            prefilled.hidden.append(hidden)

        def on_error(part: list[Sequence], error: Exception) -> bool:
            size = f"{len(chunk)} of the {sequence.num_prompt_tokens} prompt tokens"
            exhausted = self._on_error(error, f"prefill of {size} of {names_of(part)}")
            self._batch.kv_cache.zero(slot, slot + 1)
            self._partial = None
            return exhausted

        compute_isolated([sequence], compute, on_error, prefilled.failed.append)

    def _next_slot(self, prefilled: Prefilled) -> int:
        return len(self._batch) + len(prefilled.sequences)


def _width(sequences: list[Sequence]) -> int:
    return max(sequence.num_prompt_tokens for sequence in sequences)
