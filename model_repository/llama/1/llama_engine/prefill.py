"""Prefill: which prompts are computed next, how many in one pass, and what happens if that fails.

Prompts are computed in order of arrival, one pass before each decode step and at most `budget` tokens in it, which
bounds how long decoding sequences wait. Prompts that fit are computed together. A longer one is computed in chunks, one
per pass. A sequence gets its KV slot when its prefill begins. The prompt of a request with several choices is computed
for one of them, and copied for each other one whose turn comes while one of them still has it in its slot. A pass
copies COPIED_BUDGETS times `budget` tokens at most, or one prompt.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch

from llama_engine.isolation import Isolation
from llama_engine.model.model_runner import ModelRunner, PromptChunk
from llama_engine.prompt_log_probs import prompt_log_probs
from llama_engine.sampling.log_probs import TokenLogProbs
from llama_engine.sequence import PromptShare, Sequence
from llama_engine.slot_batch import SlotBatch

COPIED_BUDGETS = 16
"""Prefill budgets of copied tokens per pass. Copying a token takes less than a sixteenth of the time to compute it, so
the choices of a request whose prompt fits the budget get their copies in one pass, before the first choice can end.
"""


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


class _Part(NamedTuple):
    """The results of a pass. hidden: last hidden states, [sequences, hidden]. log_probs: of the prompts' tokens, where
    requested."""

    sequences: list[Sequence]
    chunks: list[PromptChunk]
    hidden: torch.Tensor
    log_probs: list[list[TokenLogProbs]]


class Prefill:
    """The sequences whose prompts are not cached yet."""

    def __init__(self, model: ModelRunner, batch: SlotBatch, budget: int, isolation: Isolation) -> None:
        """budget: tokens per pass."""
        self._model, self._batch, self._budget, self._isolation = model, batch, budget, isolation
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
        """Run one pass over the next prompts, if there are any, and copy prompts that are cached."""
        prefilled = Prefilled()
        group = self._next_group()
        if group:
            self._computing += group
            self._compute(group, prefilled)
        self._copy_prompts(prefilled)
        for sequence in prefilled.failed:
            self._batch.release(sequence)
        if self._partial in (*prefilled.sequences, *prefilled.failed):
            self._partial = None
        return prefilled

    def commit(self) -> None:
        """Forget the last pass: each of its sequences is now in the batch, finished, or partly cached."""
        self._computing = []

    def _next_group(self) -> list[Sequence]:
        """Take the next sequences to prefill together: in order of arrival, while their prompts fit the budget.

        A prompt beyond the budget is taken alone. Of choices that share a prompt only the first is taken.
        """
        if self._partial is not None:
            return [self._partial]
        group: list[Sequence] = []
        shares: list[PromptShare] = []
        tokens = 0
        for sequence in [sequence for sequence in self._queue if not _can_be_copied(sequence)]:
            if sequence.share in shares:
                continue
            tokens += sequence.num_uncached
            if tokens > self._budget and group:
                break
            if tokens > self._budget:
                self._partial = sequence
            group.append(sequence)
            if sequence.share is not None:
                shares.append(sequence.share)
        for sequence in group:
            self._queue.remove(sequence)
            self._batch.reserve(sequence)
        return group

    def _compute(self, group: list[Sequence], prefilled: Prefilled) -> None:
        """Compute the next chunk of each prompt, all of it if it fits."""
        parts, failed = self._isolation.isolate("prefill", group, self._compute_part)
        prefilled.failed += failed
        for part in parts:
            for sequence, chunk, log_probs in zip(part.sequences, part.chunks, part.log_probs, strict=True):
                prefilled.tokens += len(chunk.tokens)
                sequence.num_cached += len(chunk.tokens)
                sequence.prompt_log_probs += log_probs
                if sequence.share is not None and not sequence.num_uncached:
                    sequence.share.add(sequence)
            if not part.sequences[0].num_uncached:
                prefilled.sequences += part.sequences
                prefilled.hidden.append(part.hidden)

    def _compute_part(self, part: list[Sequence]) -> _Part:
        """Compute the next chunks of prompts, which can be repeated."""
        chunks = [self._next_chunk(sequence) for sequence in part]
        log_probs: list[list[TokenLogProbs]] = [[] for _ in part]
        if any(sequence.request.prompt_logprobs is not None for sequence in part):
            states = self._model.prefill(chunks, every=True)
            lengths = [len(chunk.tokens) for chunk in chunks]
            # As many logits at once as a decode step has, which the memory plan covers.
            rows = self._batch.slots
            log_probs = [
                prompt_log_probs(self._model, sequence, chunk, its_states, rows)
                for sequence, chunk, its_states in zip(part, chunks, torch.split(states, lengths), strict=True)
            ]
            hidden = states[[end - 1 for end in accumulate(lengths)]]
        else:
            hidden = self._model.prefill(chunks)
        for row, (sequence, chunk) in enumerate(zip(part, chunks, strict=True)):
            if sequence.share is not None and sequence.num_uncached == len(chunk.tokens):
                sequence.share.keep(hidden[row : row + 1])
        return _Part(part, chunks, hidden, log_probs)

    def _copy_prompts(self, prefilled: Prefilled) -> None:
        """Copy the prompts of choices that another choice has cached. A copy that fails costs that choice alone."""
        tokens = 0
        for sequence in [sequence for sequence in self._queue if _can_be_copied(sequence)]:
            if tokens and tokens + sequence.num_prompt_tokens > COPIED_BUDGETS * self._budget:
                break
            tokens += sequence.num_prompt_tokens
            self._queue.remove(sequence)
            self._computing.append(sequence)
            self._batch.reserve(sequence)
            hidden, failed = self._isolation.isolate("copying the prompt", [sequence], self._copy)
            prefilled.sequences += [] if failed else [sequence]
            prefilled.hidden += hidden
            prefilled.failed += failed

    def _copy(self, part: list[Sequence]) -> torch.Tensor:
        """Copy a choice's prompt from another choice; return the hidden state of its last token, [1, hidden]."""
        (sequence,) = part
        assert sequence.share is not None
        source = sequence.share.cached()
        assert source is not None
        assert source.kv_slot is not None
        assert sequence.kv_slot is not None
        assert sequence.share.hidden is not None
        self._model.copy(source.kv_slot, sequence.kv_slot, sequence.num_prompt_tokens)
        sequence.num_cached = sequence.num_copied = sequence.num_prompt_tokens
        sequence.prompt_log_probs = source.prompt_log_probs
        sequence.share.add(sequence)
        return sequence.share.hidden

    def _next_chunk(self, sequence: Sequence) -> PromptChunk:
        assert sequence.kv_slot is not None, "the sequence has no KV slot"
        start = sequence.num_cached
        return PromptChunk(sequence.kv_slot, start, sequence.request.prompt_tokens[start : start + self._budget])


def _can_be_copied(sequence: Sequence) -> bool:
    """Return whether another choice of the request has the prompt in its slot."""
    return sequence.share is not None and sequence.share.cached() is not None
