"""Chunked prefill: selects the prompts of each prefill pass, computes them, and isolates failures.

Prompts are computed in order of arrival. Each decode step is preceded by one pass of at most `budget` tokens, which
bounds how long decoding sequences wait. Prompts that fit the budget are computed together; a longer prompt is computed
in chunks, one per pass. A sequence gets its KV slot when its prefill begins. The choices of a request share a prompt:
it is computed for one choice and copied to the others, as long as some choice still has it in its slot (`PromptShare`
in `sequence` selects which). A pass copies at most COPIED_BUDGETS times `budget` tokens, or one prompt.
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
from llama_engine.transfer import to_device

COPIED_BUDGETS = 16
"""Limit of copied tokens per pass, as a multiple of the prefill budget. Copying a token takes less than 1/16 of the
time to compute it. All (up to 16) choices of a prompt within the budget are copied in one pass, before one can finish.
"""


@dataclass
class Prefilled:
    """The outcome of a prefill pass.

    sequences: those whose prompts are now completely cached. hidden: hidden states of their last tokens, in order,
    [rows, hidden] in all. tokens: number of prompt tokens computed. failed: sequences that finished with an error.
    """

    sequences: list[Sequence] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    tokens: int = 0
    failed: list[Sequence] = field(default_factory=list)


class _Part(NamedTuple):
    """The output of a pass over some sequences. hidden: hidden states of the chunks' last tokens, [sequences, hidden].
    log_probs: log probabilities of each sequence's prompt tokens, empty if not requested."""

    sequences: list[Sequence]
    chunks: list[PromptChunk]
    hidden: torch.Tensor
    log_probs: list[list[TokenLogProbs]]


class Prefill:
    """Queues and prefills the sequences whose prompts are not completely cached."""

    def __init__(self, model: ModelRunner, batch: SlotBatch, budget: int, isolation: Isolation) -> None:
        """budget: maximum prompt tokens computed per pass."""
        self._model, self._batch, self._budget, self._isolation = model, batch, budget, isolation
        self._queue: deque[Sequence] = deque()
        # The sequence whose prompt exceeds the budget and is being computed in chunks.
        self._partial: Sequence | None = None
        # The sequences of the last pass until `commit`; `clear` returns them if the step fails in between.
        self._computing: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._queue) + (self._partial is not None)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._queue.append(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Remove a sequence and free its KV slot; return whether it was queued or partly cached."""
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
        """Run one pass over the next prompts, if any, and copy cached prompts to waiting choices."""
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
        """Confirm the last pass: each of its sequences is now in the batch, finished, or partly cached."""
        self._computing = []

    def _next_group(self) -> list[Sequence]:
        """Return the sequences of the next pass; those that begin leave the queue and get a KV slot.

        If a prompt is partly computed, its sequence alone. Else the next ones, in order of arrival, whose prompts fit
        the budget together; a longer prompt is taken alone and becomes `_partial`. Of choices that share a prompt only
        the first is taken, and none whose prompt can be copied.
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
        """Compute the next chunk of each prompt, or the whole prompt if it fits the budget."""
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
        """Compute the next chunk of each sequence's prompt. Repeatable: `num_cached` is advanced by the caller."""
        chunks = [self._next_chunk(sequence) for sequence in part]
        log_probs: list[list[TokenLogProbs]] = [[] for _ in part]
        if any(sequence.request.prompt_logprobs is not None for sequence in part):
            states = self._model.prefill(chunks, every=True)
            # The logits of at most `slots` tokens at once, as in a decode step: the memory plan covers these.
            log_probs = prompt_log_probs(self._model, part, chunks, states, self._batch.slots)
            ends = accumulate(len(chunk.tokens) for chunk in chunks)
            hidden = states[to_device([end - 1 for end in ends], states.device)]
        else:
            hidden = self._model.prefill(chunks)
        for row, (sequence, chunk) in enumerate(zip(part, chunks, strict=True)):
            if sequence.share is not None and sequence.num_uncached == len(chunk.tokens):
                sequence.share.keep(hidden[row : row + 1])
        return _Part(part, chunks, hidden, log_probs)

    def _copy_prompts(self, prefilled: Prefilled) -> None:
        """Copy cached prompts to the choices that wait for them. A failed copy fails only that choice."""
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
        """Copy the prompt's KV cache to a choice's slot; return the hidden state of the last token, [1, hidden]."""
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
    """Return whether another choice of the request has the prompt in its KV slot."""
    return sequence.share is not None and sequence.share.cached() is not None
