"""Prefill: which prompts are computed next, how many in one pass, and what happens if that fails.

Prompts are computed in order of arrival, one pass before each decode step and at most `budget` tokens in it, which
bounds how long decoding sequences wait. Prompts that fit are computed together. A longer one is computed in chunks, one
per pass. A sequence gets its KV slot when its prefill begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from llama_engine.isolation import compute_isolated
from llama_engine.model.model_runner import Chunk, ModelRunner
from llama_engine.sequence import Sequence, names_of
from llama_engine.slot_batch import SlotBatch


@dataclass
class Prefilled:
    """The outcome of a prefill pass.

    sequences: whose prompts are cached now. hidden: hidden states of their last tokens, in order, [rows, hidden] in
    all. tokens: prompt tokens computed. failed: sequences that failed alone.
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
        """budget: tokens per pass. on_error: logs a failed pass; returns whether it exhausted the memory."""
        self._model = model
        self._batch = batch
        self._budget = budget
        self._on_error = on_error
        self._queue: deque[Sequence] = deque()
        # The sequence whose prompt is partly cached.
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
            self._batch.release(sequence)
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
        for sequence in sequences:
            self._batch.release(sequence)
        return list(sequences)

    def step(self) -> Prefilled:
        """Run one pass over the next prompts, if there are any."""
        prefilled = Prefilled()
        if self._partial is None and self._queue:
            if self._queue[0].num_uncached <= self._budget:
                self._computing = self._next_group()
                self._compute(self._computing, prefilled)
                return prefilled
            self._partial = self._queue.popleft()
            self._batch.reserve(self._partial)
        if self._partial is not None:
            self._computing = [self._partial]
            self._compute(self._computing, prefilled)
            if prefilled.sequences or prefilled.failed:
                self._partial = None
        return prefilled

    def commit(self) -> None:
        """Forget the sequences of the last pass: they are in the batch, finished, or partly cached."""
        self._computing = []

    def _next_group(self) -> list[Sequence]:
        """Take the sequences that are computed together: in order, while their prompts fit the budget."""
        group: list[Sequence] = []
        tokens = 0
        while self._queue:
            tokens += self._queue[0].num_uncached
            if tokens > self._budget:
                break
            group.append(self._queue.popleft())
            self._batch.reserve(group[-1])
        return group

    def _compute(self, group: list[Sequence], prefilled: Prefilled) -> None:
        """Compute the next chunk of each prompt, all of it if it fits. What fails together is computed in halves."""

        def compute(part: list[Sequence]) -> None:
            chunks = [self._next_chunk(sequence) for sequence in part]
            hidden = self._model.prefill(chunks)
            prefilled.tokens += sum(len(chunk.tokens) for chunk in chunks)
            for sequence, chunk in zip(part, chunks, strict=True):
                sequence.num_cached += len(chunk.tokens)
            if not part[0].num_uncached:
                prefilled.sequences += part
                prefilled.hidden.append(hidden)

        def on_error(part: list[Sequence], error: Exception) -> bool:
            chunks = [self._next_chunk(sequence) for sequence in part]
            tokens = sum(len(chunk.tokens) for chunk in chunks)
            return self._on_error(error, f"prefill of {names_of(part)}, {tokens} tokens,")

        def on_failed(sequence: Sequence) -> None:
            self._batch.release(sequence)
            prefilled.failed.append(sequence)

        compute_isolated(group, compute, on_error, on_failed)

    def _next_chunk(self, sequence: Sequence) -> Chunk:
        assert sequence.kv_slot is not None, "the sequence has no KV slot"
        start = sequence.num_cached
        return Chunk(sequence.kv_slot, start, sequence.request.prompt_tokens[start : start + self._budget])
