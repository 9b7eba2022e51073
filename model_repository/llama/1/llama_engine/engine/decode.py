"""Decoding: the sequences that decode, with their state in dense tensors, and the step that gives each its next token.

Batch indices in use are contiguous from 0, so that a decode step reads views of the state tensors. `DecodeBatch.remove`
moves the last sequence to the freed index. A sequence keeps its KV slot, an entry of the page table, from prefill until
it finishes or is preempted: `kv_slots` maps batch indices to KV slots.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from llama_engine.engine.drafts import Draft
from llama_engine.engine.failures import Isolation, log_name
from llama_engine.engine.page_manager import PageManager
from llama_engine.engine.sequence import Sequence
from llama_engine.kernels.transfers import to_device
from llama_engine.model.model_runner import ModelRunner, TokenChunk
from llama_engine.sampling.sampler import FAILED, Sampler
from llama_engine.sampling.state import SamplingFeatures, SamplingState, features_of

if TYPE_CHECKING:
    from llama_engine.engine.cuda_graphs import DecodeGraphs

MAX_FAILED_REPLAYS = 3
"""Consecutive failed replays after which CUDA graphs are no longer used."""

_log = logging.getLogger(__name__)


class DecodeBatch:
    """The decoding sequences and their state. Not thread-safe."""

    def __init__(self, slots: int, vocabulary: int, device: torch.device, pages: PageManager) -> None:
        """Allocate the state of `slots` sequences. vocabulary: number of tokens. pages: the KV cache's."""
        self.slots = slots
        self._pages = pages
        self.sequences: list[Sequence] = []
        """The sequences by batch index."""
        self.sampling = SamplingState(slots, vocabulary, device)
        self.features = SamplingFeatures()
        """Sampling features that at least one sequence uses."""
        self.kv_slots = torch.arange(slots, device=device)
        """The KV slot of each sequence: [slots]."""
        self.tokens = torch.zeros(slots, dtype=torch.long, device=device)
        """The last token of each sequence, which its next decode step reads: [slots]."""
        self.positions = torch.zeros(slots, dtype=torch.long, device=device)
        """The position of that token: [slots]."""

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequences: list[Sequence]) -> None:
        """Add sequences with computed tokens at the next indices: PREFILL → DECODE.

        Errors of the device are passed on; the batch is then unchanged.
        """
        first, last = len(self.sequences), len(self.sequences) + len(sequences)
        states = [(sequence.kv_slot, sequence.num_computed) for sequence in sequences]
        self.kv_slots[first:last], self.positions[first:last] = to_device(states, self.positions.device).T
        self.sampling.set(first, sequences)
        # The sequences are replaced after everything that can fail.
        self._replace([*self.sequences, *sequences])
        for sequence in sequences:
            sequence.start_decoding()

    def remove(self, index: int) -> None:
        """Free an index, its KV slot and pages, and move the last sequence to the index; keys and values stay.

        Errors of the device are passed on. The list of sequences changes last: if a copy fails, all other sequences
        are still valid.
        """
        last = len(self.sequences) - 1
        removed, remaining = self.sequences[index], self.sequences[:last]
        if index != last:
            remaining[index] = self.sequences[last]
            self.sampling.copy(last, index)
            for state in (self.kv_slots, self.tokens, self.positions):
                state[index] = state[last]
        self._replace(remaining)
        self._pages.release(removed)

    def clear(self) -> None:
        """Free all indices, their KV slots and pages."""
        sequences = self.sequences
        self._replace([])
        for sequence in sequences:
            self._pages.release(sequence)

    def advance(self, decoded: int, tokens: torch.Tensor) -> None:
        """Store the sampled tokens, [batch], possibly FAILED, and advance the positions of the first `decoded`."""
        self.positions[:decoded] += 1
        self.tokens[: len(tokens)] = tokens

    def _replace(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.features = features_of(sequences)


class DecodeStep:
    """Computes the next tokens of every sequence of the batch, by CUDA graphs if they are captured. Not thread-safe.

    The first `decoding` sequences run a forward pass. The others have just been prefilled: their last hidden states
    are an argument. A pass also computes the tokens of drafts, and `verify` samples what follows those that were right.
    """

    def __init__(self, model: ModelRunner, sampler: Sampler, batch: DecodeBatch, isolation: Isolation) -> None:
        self._model, self._sampler, self._batch, self._isolation = model, sampler, batch, isolation
        self.graphs: DecodeGraphs | None = None
        """Captured decode steps; None launches each kernel separately."""
        self._failed_replays = 0
        # The drafts of the step that may have further right guesses.
        self._open: dict[Sequence, Draft] = {}

    def first_tokens(self, decoding: int, prefilled: list[torch.Tensor]) -> torch.Tensor:
        """Return the first tokens of the prefilled sequences, [batch], and store them; `run` then gets no states."""
        tokens = self._launch(self._batch.sequences[decoding:], decoding, prefilled, {})
        self._batch.tokens[decoding : decoding + len(tokens)] = tokens
        return tokens

    def run(self, decoding: int, prefilled: list[torch.Tensor], drafts: Mapping[Sequence, Draft]) -> torch.Tensor:
        """Return the next tokens, [batch], of sequences without one in this step; store them as the next step's inputs.

        decoding: number of leading sequences that run a forward pass. prefilled: hidden states of the others,
        [batch, hidden] in all; empty if they have their tokens. drafts: guesses for decoding sequences, which have
        pages for them. A token is FAILED if its computation failed or its logits were not finite.
        """
        self._open = {}
        tokens = self._replay(decoding, prefilled) if not drafts else None
        if tokens is None:
            sequences = self._batch.sequences if prefilled else self._batch.sequences[:decoding]
            tokens = self._launch(sequences, decoding, prefilled, drafts)
            self._batch.advance(decoding, tokens)
        # A replay advances the batch's tensors itself, but not these counts.
        for sequence in self._batch.sequences[:decoding]:
            sequence.num_computed += 1
            sequence.num_steps += 1
        return tokens

    def verify(self) -> tuple[list[int], torch.Tensor] | None:
        """Sample once more for the sequences whose last token was guessed.

        Returns their batch indices, and their tokens in that order, [batch]. Call it after the last tokens were
        appended, until it returns None: no guess was right. Guesses that can't be sampled from are given up, and the
        next step computes these tokens.
        """
        going = {sequence: draft for sequence, draft in self._open.items() if draft.goes_on(sequence)}
        self._open = going
        if not going:
            return None
        batch, sequences = self._batch, list(going)
        indices = [batch.sequences.index(sequence) for sequence in sequences]
        try:
            logits = torch.stack([draft.logits[draft.accepted] for draft in going.values()])
            tokens = self._sampler.sample(logits, indices, sequences, batch.features)
        except Exception as error:  # noqa: BLE001 - the next step isolates the sequence that fails
            self._isolation.record(error, f"verifying drafts of {log_name(sequences)}")
            self._open = {}
            return None
        batch.tokens[indices] = tokens
        batch.positions[indices] += 1
        for sequence, draft in going.items():
            draft.accepted += 1
            sequence.num_computed += 1
        return indices, tokens

    def _replay(self, decoding: int, prefilled: list[torch.Tensor]) -> torch.Tensor | None:
        """Replay the captured step and return its tokens, [batch]; None if nothing is captured or the replay fails."""
        if self.graphs is None:
            return None
        try:
            tokens = self.graphs.step(decoding, prefilled)
        except Exception as error:  # noqa: BLE001 - the launched step isolates the sequence that fails
            self._isolation.record(error, f"replaying a step over {log_name(self._batch.sequences)}")
            self._failed_replays += 1
            if self._failed_replays == MAX_FAILED_REPLAYS:
                _log.error("%d consecutive replays failed; CUDA graphs are no longer used", MAX_FAILED_REPLAYS)
                self.graphs = None
            return None
        self._failed_replays = 0
        return tokens

    def _launch(
        self,
        sequences: list[Sequence],
        decoding: int,
        prefilled: list[torch.Tensor],
        drafts: Mapping[Sequence, Draft],
    ) -> torch.Tensor:
        """Compute the tokens of successive sequences, [batch], without graphs; on a failure, retry in halves."""
        batch = self._batch
        index_of = {sequence: index for index, sequence in enumerate(batch.sequences)}

        def compute(part: list[Sequence]) -> torch.Tensor:
            first = index_of[part[0]]
            return self._compute_and_sample(slice(first, first + len(part)), decoding, prefilled, {})

        if drafts:
            try:
                return self._compute_and_sample(slice(0, len(sequences)), decoding, prefilled, drafts)
            except Exception as error:  # noqa: BLE001 - the tokens are computed without drafts
                self._isolation.record(error, f"the drafts of {log_name(drafts)}")
                self._open = {}
        parts, failed = self._isolation.isolate("the next tokens", sequences, compute)
        if not failed:
            return torch.cat(parts)
        tokens = torch.full_like(batch.tokens[: len(sequences)], FAILED)
        computed = [index for index, sequence in enumerate(sequences) if sequence not in failed]
        tokens[computed] = torch.cat([tokens[:0], *parts])
        return tokens

    def _compute_and_sample(
        self, indices: slice, decoding: int, prefilled: list[torch.Tensor], drafts: Mapping[Sequence, Draft]
    ) -> torch.Tensor:
        """Return the next tokens, [batch], of these batch indices, and keep the logits after guessed tokens."""
        sequences = self._batch.sequences[indices]
        hidden = []
        if indices.start < decoding:
            hidden += self._run_model(slice(indices.start, min(indices.stop, decoding)), drafts)
        if indices.stop > decoding:
            place = max(indices.start - decoding, 0)
            # They go before the states of guessed tokens, because they are sampled, as those of last tokens are.
            hidden.insert(1, torch.cat(prefilled)[place : indices.stop - decoding])
        logits = self._model.logits(torch.cat(hidden))
        tokens = self._sampler.sample(logits[: len(sequences)], indices, sequences, self._batch.features)
        place = len(sequences)
        for sequence in sequences:
            if draft := drafts.get(sequence):
                draft.logits = logits[place : place + len(draft.tokens)]
                place += len(draft.tokens)
                self._open[sequence] = draft
        return tokens

    def _run_model(self, indices: slice, drafts: Mapping[Sequence, Draft]) -> list[torch.Tensor]:
        """Return the hidden states of decoding sequences' last tokens, [batch, hidden], and of all guessed tokens."""
        batch = self._batch
        sequences = batch.sequences[indices]
        if not drafts:
            span = max(sequence.num_computed for sequence in sequences) + 1
            states = batch.kv_slots[indices], batch.tokens[indices], batch.positions[indices]
            return [self._model.decode(*states, span)]
        chunks = []
        for sequence in sequences:
            assert sequence.kv_slot is not None, "the sequence has no KV slot"
            guesses = drafts[sequence].tokens if sequence in drafts else []
            chunks.append(TokenChunk(sequence.kv_slot, sequence.num_computed, [sequence.output_tokens[-1], *guesses]))
        hidden = self._model.run_chunks(chunks, every=True)
        is_last = torch.zeros(len(hidden), dtype=torch.bool)
        is_last[[0, *accumulate(len(chunk.tokens) for chunk in chunks[:-1])]] = True
        is_last = to_device(is_last, hidden.device)
        return [hidden[is_last], hidden[~is_last]]
