"""Chunked prefill: selects the prompts of each prefill pass, computes them, and isolates failures.

Prompts are computed in the order in which they were admitted, those of preempted sequences first, with the output so
far or a resumed one.
Each decode step is preceded by one pass of at most `budget` tokens, which bounds how long decoding sequences wait.
Prompts that fit the budget are computed together; a longer prompt is computed in chunks, one per pass. A sequence gets
its KV slot and pages when its prefill begins, and waits if there are too few; later sequences then wait, too. Of its
prompt, what the prefix cache has is not computed. A sequence also waits while another one computes a page that it can
take over. The choices of a request share a prompt: it is computed for one choice, and the others take over its pages,
as long as some choice still has them (`PromptShare` in `sequence_builder` selects which). A sequence for an embedding
finishes here: its hidden states are pooled. It leaves at once, and the next one comes: while other sequences decode or
wait, embeddings have only a part of the budget, and those that exceed it are passed over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from llama_engine.engine.decode import DecodeBatch
from llama_engine.engine.failures import Isolation
from llama_engine.engine.page_manager import PageManager
from llama_engine.engine.pooler import Pooler, finish_embeddings
from llama_engine.engine.prefill_pass import ComputedChunks, compute_chunks
from llama_engine.engine.sequence import Sequence
from llama_engine.engine.sequence_builder import PromptShare
from llama_engine.model.model_runner import ModelRunner, TokenChunk

EMBEDDING_SHARE = 4
"""Divisor of the budget that embeddings have while other sequences decode or wait."""


@dataclass
class Prefilled:
    """The outcome of a prefill pass.

    sequences: those whose prompts are now completely computed. hidden: hidden states of their last tokens, in order,
    [sequences, hidden] in all. tokens: number of prompt tokens computed. finished: sequences that failed, or that have
    their embedding.
    """

    sequences: list[Sequence] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    tokens: int = 0
    finished: list[Sequence] = field(default_factory=list)


class Prefill:
    """Queues and prefills the sequences whose prompts are not completely computed."""

    def __init__(
        self,
        model: ModelRunner,
        batch: DecodeBatch,
        pages: PageManager,
        budget: int,
        isolation: Isolation,
        pooler: Pooler | None = None,
    ) -> None:
        """budget: maximum tokens computed per pass. pooler: None if no sequence is for an embedding."""
        self._model, self._batch, self._pages = model, batch, pages
        self._budget, self._isolation, self._pooler = budget, isolation, pooler
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
        """Return how many pages another sequence must leave: one for each running or starting one that may grow."""
        return sum(map(self._pages.may_grow, dict.fromkeys([*self.running, *starting])))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.queue.append(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Queue a preempted sequence before all others; if it is `partial`, take its pages."""
        if sequence is self.partial:
            # Like a sampled token, a finite last hidden state proves that everything before is finite.
            if self._partial_hidden is not None and bool(self._partial_hidden.isfinite().all()):
                self._pages.cache_pages(sequence)
            self.remove(sequence)
        sequence.preempt()
        self.queue.appendleft(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Remove a sequence, free its KV slot and pages; return whether it was queued or partly computed."""
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
        """Run one pass over the next prompts, if any, and copy computed prompts to waiting choices."""
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
        """Confirm the last pass: each of its sequences is now in the batch, finished, or partly computed."""
        self._computing = []

    def _next_group(self) -> list[Sequence]:
        """Return the sequences of the next pass; those that begin leave the queue and get a KV slot and pages.

        If a prompt is partly computed, its sequence alone. Else the next ones, in order, whose tokens fit the budget
        together; a longer prompt is taken alone and becomes `partial`. An embedding beyond the embeddings' budget stays
        queued, and later prompts are taken. Of the choices of a prompt, only the first is taken, none if one has it.
        """
        if self.partial is not None:
            self._computing.append(self.partial)
            return [self.partial]
        group: list[Sequence] = []
        shares: list[PromptShare] = []
        computed: set[bytes] = set()
        tokens = embedded = 0
        embedding_budget = self._embedding_budget()
        for sequence in list(self.queue):
            if sequence.share in shares or sequence.prompt_source() is not None:
                continue
            matching = len(self._pages.match_prefix(sequence))
            uncomputed = self._pages.uncomputed_pages(sequence, matching)
            if uncomputed and uncomputed[0] in computed:
                continue
            size = sequence.num_tokens - matching * self._pages.page_size
            embeds = sequence.request.return_embedding
            embedded += size if embeds else 0
            if embeds and embedded > embedding_budget and group:
                continue
            tokens += size
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
            if size > (embedding_budget if embeds else self._budget):
                self.partial, self._partial_hidden = sequence, None
                break
        return group

    def _compute(self, group: list[Sequence], prefilled: Prefilled) -> None:
        """Compute the next chunk of each prompt, or the whole prompt if it fits the budget."""
        parts, failed = self._isolation.isolate("prefill", group, self._compute_part)
        prefilled.finished += failed
        for part in parts:
            computed = zip(part.sequences, part.chunks, part.scores, part.pooled, strict=True)
            for sequence, chunk, scores, pooled in computed:
                prefilled.tokens += len(chunk.tokens)
                sequence.num_computed += len(chunk.tokens)
                sequence.add_scores(scores)
                sequence.pooled = pooled
                if sequence.share is not None and not sequence.num_uncomputed:
                    sequence.share.add(sequence)
            if part.sequences[0].num_uncomputed:
                self._partial_hidden = part.hidden
                continue
            embedded, remaining = finish_embeddings(part.sequences)
            prefilled.finished += embedded
            if remaining:
                prefilled.sequences += [part.sequences[index] for index in remaining]
                prefilled.hidden.append(part.hidden[remaining] if embedded else part.hidden)

    def _compute_part(self, part: list[Sequence]) -> ComputedChunks:
        """Compute the next chunk of each sequence's prompt. Repeatable: `num_computed` is advanced by the caller."""
        chunks = [self._next_chunk(sequence) for sequence in part]
        # The memory plan covers the logits of at most `slots` tokens at once, as in a decode step.
        computed = compute_chunks(self._model, self._pooler, part, chunks, self._batch.slots)
        for index, (sequence, chunk) in enumerate(zip(part, chunks, strict=True)):
            if sequence.share is not None and sequence.num_uncomputed == len(chunk.tokens):
                sequence.share.keep(computed.hidden[index : index + 1])
        return computed

    def _copy_prompts(self, prefilled: Prefilled) -> None:
        """Give waiting choices the pages of a computed prompt. A failed copy fails only that choice."""
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

    def _next_chunk(self, sequence: Sequence) -> TokenChunk:
        assert sequence.kv_slot is not None, "the sequence has no KV slot"
        start = sequence.num_computed
        budget = self._embedding_budget() if sequence.request.return_embedding else self._budget
        end = min(start + budget, sequence.num_tokens)
        return TokenChunk(sequence.kv_slot, start, sequence.tokens(start, end))

    def _embedding_budget(self) -> int:
        """Return the maximum tokens of embeddings in a pass."""
        alone = not self._batch.sequences and all(sequence.request.return_embedding for sequence in self.queue)
        return self._budget if alone else max(self._budget // EMBEDDING_SHARE, 1)
