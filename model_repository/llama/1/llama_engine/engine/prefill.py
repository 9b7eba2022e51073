"""Chunked prefill: selects the prompts of each prefill pass, computes them, and isolates failures.

Prompts are computed in order of arrival, and after a preemption first, together with what was generated; so is an
output that a request resumes. Each decode step is preceded by one pass of at most `budget`
tokens, which bounds how long decoding sequences wait. Prompts that fit the budget are computed together; a longer
prompt is computed in chunks, one per pass. A sequence gets its KV slot and pages when its prefill begins, and waits if
there are too few; later sequences then wait, too. Of its prompt, what the prefix cache has is not computed. A sequence
also waits while another one computes a page that it can take over. The choices of a request share a prompt: it is
computed for one choice, and the others take over its pages, as long as some choice still has them (`PromptShare` in
`sequence_builder` selects which).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch

from llama_engine.engine.decode import DecodeBatch
from llama_engine.engine.failures import Isolation
from llama_engine.engine.page_manager import PageManager
from llama_engine.engine.sequence import Sequence
from llama_engine.engine.sequence_builder import PromptShare
from llama_engine.kernels.cache_shape import to_device
from llama_engine.model.model_runner import ModelRunner, PromptChunk
from llama_engine.sampling.log_probs import TokenLogProbs, token_scores


@dataclass
class Prefilled:
    """The outcome of a prefill pass.

    sequences: those whose prompts are now completely cached. hidden: hidden states of their last tokens, in order,
    [sequences, hidden] in all. tokens: number of prompt tokens computed. finished: sequences that failed.
    """

    sequences: list[Sequence] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    tokens: int = 0
    finished: list[Sequence] = field(default_factory=list)


class _Part(NamedTuple):
    """The output of a pass over some sequences. hidden: hidden states of the chunks' last tokens, [sequences, hidden].
    scores: result of `log_probs.token_scores`."""

    sequences: list[Sequence]
    chunks: list[PromptChunk]
    hidden: torch.Tensor
    scores: list[list[TokenLogProbs]]


class Prefill:
    """Queues and prefills the sequences whose prompts are not completely cached."""

    def __init__(
        self, model: ModelRunner, batch: DecodeBatch, pages: PageManager, budget: int, isolation: Isolation
    ) -> None:
        """budget: maximum tokens computed per pass."""
        self._model, self._batch, self._pages = model, batch, pages
        self._budget, self._isolation = budget, isolation
        self.queue: deque[Sequence] = deque()
        """The sequences whose prefill has not begun, in the order in which it will."""
        self.partial: Sequence | None = None
        """The sequence whose prompt exceeds the budget and is being computed in chunks."""
        # Hidden state of the last computed token of `partial`, [1, hidden]; None before its first pass.
        self._partial_hidden: torch.Tensor | None = None
        # The sequences of the last pass until `commit`; `clear` returns them if the step fails in between.
        self._computing: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.queue) + (self.partial is not None)

    @property
    def running(self) -> list[Sequence]:
        """The sequences that have pages between two steps: those that decode, and `partial`."""
        return [*self._batch.sequences, *([] if self.partial is None else [self.partial])]

    def headroom(self, starting: Iterable[Sequence] = ()) -> int:
        """Return how many pages a sequence that starts must leave: one for each running one that may grow.

        starting: sequences that start in the same pass.
        """
        return sum(map(self._pages.may_grow, dict.fromkeys([*self.running, *starting])))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.queue.append(sequence)

    def extend_pages(self) -> int:
        """Give every decoding sequence a page for its next position, the oldest first; return how many were preempted.

        While there is no page, the youngest sequence of the lowest priority, which may be `partial`, loses its own.
        """
        preempted = 0
        for sequence in sorted(self._batch.sequences, key=_seniority):
            # Preempt until the sequence has its page or is itself preempted.
            while sequence.kv_slot is not None and not self._pages.extend(sequence):
                self._preempt(max(self.running, key=_seniority))
                preempted += 1
        return preempted

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's pages, and queue it before all others."""
        if sequence in self._batch.sequences:
            self._batch.remove(self._batch.sequences.index(sequence))
        elif sequence is self.partial:
            # Like a sampled token, a finite last hidden state proves that everything before is finite.
            if self._partial_hidden is not None and bool(self._partial_hidden.isfinite().all()):
                self._pages.cache_pages(sequence)
            self.partial = None
            self._pages.release(sequence)
        sequence.preempt()
        self.queue.appendleft(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Remove a sequence, free its KV slot and pages; return whether it was queued or partly cached."""
        if sequence is self.partial:
            self.partial = None
            self._pages.release(sequence)
        elif sequence in self.queue:
            self.queue.remove(sequence)
        else:
            return False
        return True

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences, those of the last pass included until `commit`."""
        partial = [] if self.partial is None else [self.partial]
        return list(dict.fromkeys([*partial, *self._computing, *self.queue]))

    def clear(self) -> None:
        """Remove all sequences and free their KV slots and pages."""
        for sequence in self.sequences:
            self._pages.release(sequence)
        self.queue.clear()
        self._computing = []
        self.partial = None

    def step(self) -> Prefilled:
        """Run one pass over the next prompts, if any, and copy cached prompts to waiting choices."""
        prefilled = Prefilled()
        group = self._next_group()
        if group:
            self._compute(group, prefilled)
        self._copy_prompts(prefilled)
        for sequence in prefilled.finished:
            self._pages.release(sequence)
        if self.partial in (*prefilled.sequences, *prefilled.finished):
            self.partial = None
        return prefilled

    def commit(self) -> None:
        """Confirm the last pass: each of its sequences is now in the batch, finished, or partly cached."""
        self._computing = []

    def _next_group(self) -> list[Sequence]:
        """Return the sequences of the next pass; those that begin leave the queue and get a KV slot and pages.

        If a prompt is partly computed, its sequence alone. Else the next ones, in order, whose tokens fit the budget
        together; a longer prompt is taken alone and becomes `partial`. If choices share a
        prompt, only the first is taken; none is taken whose prompt can be copied.
        """
        if self.partial is not None:
            self._computing.append(self.partial)
            return [self.partial]
        group: list[Sequence] = []
        shares: list[PromptShare] = []
        computed: set[bytes] = set()
        tokens = 0
        for sequence in list(self.queue):
            if sequence.share in shares or sequence.prompt_source() is not None:
                continue
            matching = len(self._pages.match_prefix(sequence))
            uncomputed = self._pages.uncomputed_pages(sequence, matching)
            if uncomputed and uncomputed[0] in computed:
                continue
            tokens += sequence.num_tokens - matching * self._pages.page_size
            if tokens > self._budget and group:
                break
            if not self._pages.allocate(sequence, self.headroom(group)):
                break
            self.queue.remove(sequence)
            self._computing.append(sequence)
            group.append(sequence)
            computed.update(uncomputed)
            if sequence.share is not None:
                shares.append(sequence.share)
            if tokens > self._budget:
                self.partial, self._partial_hidden = sequence, None
        return group

    def _compute(self, group: list[Sequence], prefilled: Prefilled) -> None:
        """Compute the next chunk of each prompt, or the whole prompt if it fits the budget."""
        parts, failed = self._isolation.isolate("prefill", group, self._compute_part)
        prefilled.finished += failed
        for part in parts:
            for sequence, chunk, scores in zip(part.sequences, part.chunks, part.scores, strict=True):
                prefilled.tokens += len(chunk.tokens)
                sequence.num_cached += len(chunk.tokens)
                sequence.add_scores(scores)
                if sequence.share is not None and not sequence.num_uncached:
                    sequence.share.add(sequence)
            if part.sequences[0].num_uncached:
                self._partial_hidden = part.hidden
                continue
            prefilled.sequences += part.sequences
            prefilled.hidden.append(part.hidden)

    def _compute_part(self, part: list[Sequence]) -> _Part:
        """Compute the next chunk of each sequence's prompt. Repeatable: `num_cached` is advanced by the caller."""
        chunks = [self._next_chunk(sequence) for sequence in part]
        scores: list[list[TokenLogProbs]] = [[] for _ in part]
        if any(sequence.scored_from is not None for sequence in part):
            states = self._model.prefill(chunks, every=True)
            # Compute the logits of at most `slots` tokens at once, as in a decode step: the memory plan covers these.
            scores = token_scores(self._model, part, chunks, states, self._batch.slots)
            ends = accumulate(len(chunk.tokens) for chunk in chunks)
            hidden = states[to_device([end - 1 for end in ends], states.device)]
        else:
            hidden = self._model.prefill(chunks)
        for index, (sequence, chunk) in enumerate(zip(part, chunks, strict=True)):
            if sequence.share is not None and sequence.num_uncached == len(chunk.tokens):
                sequence.share.keep(hidden[index : index + 1])
        return _Part(part, chunks, hidden, scores)

    def _copy_prompts(self, prefilled: Prefilled) -> None:
        """Give waiting choices the pages of a cached prompt. A failed copy fails only that choice."""
        for sequence in list(self.queue):
            source = sequence.prompt_source()
            if source is None:
                continue
            if not self._pages.fork(source, sequence, self.headroom(prefilled.sequences)):
                break
            self.queue.remove(sequence)
            self._computing.append(sequence)
            hidden, failed = self._isolation.isolate("copying the prompt", [sequence], self._copy)
            prefilled.sequences += [] if failed else [sequence]
            prefilled.hidden += hidden
            prefilled.finished += failed

    def _copy(self, part: list[Sequence]) -> torch.Tensor:
        """Copy the rest of the prompt to a choice's page; return the hidden state of the last token, [1, hidden]."""
        (sequence,) = part
        source, share = sequence.prompt_source(), sequence.share
        assert source is not None
        assert share is not None
        assert share.hidden is not None
        self._pages.copy_rest(source, sequence)
        sequence.prompt_log_probs = source.prompt_log_probs
        share.add(sequence)
        return share.hidden

    def _next_chunk(self, sequence: Sequence) -> PromptChunk:
        assert sequence.kv_slot is not None, "the sequence has no KV slot"
        start = sequence.num_cached
        end = min(start + self._budget, sequence.num_tokens)
        return PromptChunk(sequence.kv_slot, start, sequence.tokens(start, end))


def _seniority(sequence: Sequence) -> tuple[int, float]:
    """Return a sort key: sequences of high priority first, then the oldest."""
    return sequence.request.priority, sequence.arrived_at
