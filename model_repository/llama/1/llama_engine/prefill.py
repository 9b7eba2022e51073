"""Prefill: which prompts are computed next, how many in one pass, and what happens if that fails.

Prompts are computed in order of arrival, one pass before each decode step and at most `budget` tokens in it, which
bounds how long decoding sequences wait. Prompts that fit are computed together. A longer one is computed in chunks, one
per pass. A sequence gets its KV slot when its prefill begins. The prompt of a request with several choices is computed
for one of them, and copied for each other one whose turn comes while one of them still has it in its slot. A pass
copies COPIED_BUDGETS times `budget` tokens at most, or one prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from llama_engine.isolation import compute_isolated
from llama_engine.model.model_runner import ModelRunner, PromptChunk
from llama_engine.prompt_log_probs import prompt_log_probs
from llama_engine.sampling.log_probs import TokenLogProbs
from llama_engine.sequence import PromptShare, Sequence, names_of
from llama_engine.slot_batch import SlotBatch

COPIED_BUDGETS = 16
"""To copy a token takes less than a sixteenth of the time to compute it, and far less in large models. So the choices
of a request whose prompt fits the budget get their copies in one pass, before the first of them can end.
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
        # Before and after: of a prompt that an earlier pass computed, and of one that this pass does.
        copied = self._copy_prompts(prefilled, 0)
        first = next((sequence for sequence in self._queue if not _can_be_copied(sequence)), None)
        if self._partial is None and first is not None and first.num_uncached > self._budget:
            self._queue.remove(first)
            self._partial = first
            self._batch.reserve(first)
        group = [self._partial] if self._partial is not None else self._next_group()
        if group:
            self._computing += group
            self._compute(group, prefilled)
            if self._partial in (*prefilled.sequences, *prefilled.failed):
                self._partial = None
            self._copy_prompts(prefilled, copied)
        return prefilled

    def commit(self) -> None:
        """Forget the sequences of the last pass: they are in the batch, finished, or partly cached."""
        self._computing = []

    def _next_group(self) -> list[Sequence]:
        """Take the sequences that are computed together: in order, while their prompts fit the budget, and of choices
        that share a prompt the first one, unless it can be copied.
        """
        group: list[Sequence] = []
        skipped: list[Sequence] = []
        shares: list[PromptShare | None] = []
        tokens = 0
        while self._queue:
            sequence = self._queue[0]
            if _can_be_copied(sequence) or (sequence.share is not None and sequence.share in shares):
                skipped.append(self._queue.popleft())
                continue
            tokens += sequence.num_uncached
            if tokens > self._budget:
                break
            group.append(self._queue.popleft())
            shares.append(sequence.share)
            self._batch.reserve(sequence)
        self._queue.extendleft(reversed(skipped))
        return group

    def _copy_prompts(self, prefilled: Prefilled, copied: int) -> int:
        """Copy the prompts of choices that another choice has cached. A copy that fails costs that choice alone.

        copied: tokens that this pass has copied before. Return how many those are now.
        """

        def copy(part: list[Sequence]) -> None:
            (sequence,) = part
            assert sequence.share is not None
            source = sequence.share.cached()
            assert source is not None
            assert source.kv_slot is not None
            assert sequence.kv_slot is not None
            assert sequence.share.hidden is not None
            self._model.copy(source.kv_slot, sequence.kv_slot, sequence.num_prompt_tokens)
            sequence.num_cached = sequence.num_copied = sequence.num_prompt_tokens
            sequence.prompt_log_probs, sequence.prompt_json = source.prompt_log_probs, source.prompt_json
            sequence.share.add(sequence)
            prefilled.sequences.append(sequence)
            prefilled.hidden.append(sequence.share.hidden)

        def on_error(part: list[Sequence], error: Exception) -> bool:
            return self._on_error(error, f"copying the prompt of {names_of(part)}")

        for sequence in [one for one in self._queue if _can_be_copied(one)]:
            if copied and copied + sequence.num_prompt_tokens > COPIED_BUDGETS * self._budget:
                break
            copied += sequence.num_prompt_tokens
            self._queue.remove(sequence)
            self._computing.append(sequence)
            self._batch.reserve(sequence)
            compute_isolated([sequence], copy, on_error, self._on_failed(prefilled))
        return copied

    def _compute(self, group: list[Sequence], prefilled: Prefilled) -> None:
        """Compute the next chunk of each prompt, all of it if it fits. What fails together is computed in halves."""

        def compute(part: list[Sequence]) -> None:
            chunks = [self._next_chunk(sequence) for sequence in part]
            if any(sequence.request.prompt_logprobs is not None for sequence in part):
                hidden, log_probs = self._with_log_probs(part, chunks)
            else:
                hidden, log_probs = self._model.prefill(chunks), []
            for row, (sequence, chunk) in enumerate(zip(part, chunks, strict=True)):
                if sequence.share is not None and sequence.num_uncached == len(chunk.tokens):
                    sequence.share.keep(hidden[row : row + 1])
            # After everything that can fail: until here the part can be computed again.
            prefilled.tokens += sum(len(chunk.tokens) for chunk in chunks)
            for sequence, found in zip(part, log_probs, strict=False):
                sequence.prompt_log_probs += found
            for sequence, chunk in zip(part, chunks, strict=True):
                sequence.num_cached += len(chunk.tokens)
                if sequence.share is not None and not sequence.num_uncached:
                    sequence.share.add(sequence)
            if not part[0].num_uncached:
                prefilled.sequences += part
                prefilled.hidden.append(hidden)

        def on_error(part: list[Sequence], error: Exception) -> bool:
            chunks = [self._next_chunk(sequence) for sequence in part]
            tokens = sum(len(chunk.tokens) for chunk in chunks)
            return self._on_error(error, f"prefill of {names_of(part)}, {tokens} tokens,")

        compute_isolated(group, compute, on_error, self._on_failed(prefilled))

    def _with_log_probs(
        self, part: list[Sequence], chunks: list[PromptChunk]
    ) -> tuple[torch.Tensor, list[list[TokenLogProbs]]]:
        """Compute chunks; return the hidden states of their last tokens, and each sequence's log probabilities."""
        hidden = self._model.prefill(chunks, every=True)
        lengths = [len(chunk.tokens) for chunk in chunks]
        # As many logits at once as a decode step has, which the memory plan covers.
        rows = self._batch.slots
        found = [
            prompt_log_probs(self._model, sequence, chunk, states, rows)
            for sequence, chunk, states in zip(part, chunks, torch.split(hidden, lengths), strict=True)
        ]
        return hidden[[end - 1 for end in accumulate(lengths)]], found

    def _on_failed(self, prefilled: Prefilled) -> Callable[[Sequence], None]:
        def on_failed(sequence: Sequence) -> None:
            self._batch.release(sequence)
            prefilled.failed.append(sequence)

        return on_failed

    def _next_chunk(self, sequence: Sequence) -> PromptChunk:
        assert sequence.kv_slot is not None, "the sequence has no KV slot"
        start = sequence.num_cached
        return PromptChunk(sequence.kv_slot, start, sequence.request.prompt_tokens[start : start + self._budget])


def _can_be_copied(sequence: Sequence) -> bool:
    """Return whether another choice of the request has the prompt in its slot."""
    return sequence.share is not None and sequence.share.cached() is not None
