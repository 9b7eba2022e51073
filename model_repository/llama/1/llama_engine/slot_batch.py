"""The sequences that decode: all state per row, and the step that gives each sequence its next token.

The state is behind `SlotBatch.add` and `remove`: KV slot, last token, position, sampling parameters and histories. The
rows in use are the first ones, so that a decode step reads views. A row finds its keys and values through a table: a
sequence keeps its KV slot from its prefill to its end, whatever row it is in.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from llama_engine.isolation import Isolation
from llama_engine.model.model_runner import ModelRunner
from llama_engine.sampling.sampler import FAILED, Sampler
from llama_engine.sampling.sampling_state import SamplingFeatures, SamplingState, features_of
from llama_engine.sequence import Sequence, names_of

MAX_FAILED_REPLAYS = 3
"""Consecutive failures after which captured steps are no longer replayed."""

_log = logging.getLogger(__name__)


class SlotBatch:
    """The sequences that decode, and the state of their rows. Not thread-safe."""

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        """Allocate the state of `slots` rows. vocabulary: number of tokens."""
        self.slots = slots
        self.sequences: list[Sequence] = []
        """The sequence in each row in use."""
        self.sampling = SamplingState(slots, vocabulary, device)
        self.features = SamplingFeatures()
        """Sampling features that any of the sequences asks for."""
        self.kv_slots = torch.arange(slots, device=device)
        """The KV slot of each row: [slots]."""
        self.tokens = torch.zeros(slots, dtype=torch.long, device=device)
        """The last token of each row, which its next decode step reads: [slots]."""
        self.positions = torch.zeros(slots, dtype=torch.long, device=device)
        """The position of that token: [slots]."""
        # The lowest is reserved first.
        self._free = list(reversed(range(slots)))

    def __len__(self) -> int:
        return len(self.sequences)

    def reserve(self, sequence: Sequence) -> None:
        """Give a sequence whose prefill begins a KV slot."""
        sequence.kv_slot = self._free.pop()

    def release(self, sequence: Sequence) -> None:
        """Free the KV slot of a sequence that is in no row."""
        if sequence.kv_slot is not None:
            self._free.append(sequence.kv_slot)
            sequence.kv_slot = None

    def add(self, sequences: list[Sequence]) -> None:
        """Add sequences whose prompts are cached to the next rows: PREFILL → DECODE.

        Raises what the device raises; the rows are then still free.
        """
        first, last = len(self.sequences), len(self.sequences) + len(sequences)
        states = [(sequence.kv_slot, sequence.num_cached) for sequence in sequences]
        self.kv_slots[first:last], self.positions[first:last] = torch.tensor(states, device=self.positions.device).T
        self.sampling.set(first, [sequence.request for sequence in sequences])
        # After everything that can fail: until here the rows are still free.
        self._replace([*self.sequences, *sequences])
        for sequence in sequences:
            sequence.start_decoding()

    def remove(self, row: int) -> None:
        """Free a row and its KV slot: the sequence in the last row moves into it. No keys and values move.

        Raises what the device raises. The list of sequences changes last: if a copy fails, every other sequence is
        still complete in its row.
        """
        last = len(self.sequences) - 1
        removed, remaining = self.sequences[row], self.sequences[:last]
        if row != last:
            remaining[row] = self.sequences[last]
            self.sampling.copy(last, row)
            for state in (self.kv_slots, self.tokens, self.positions):
                state[row] = state[last]
        self._replace(remaining)
        self.release(removed)

    def clear(self) -> list[Sequence]:
        """Free all rows and their KV slots; return the sequences that were in them."""
        sequences = self.sequences
        self._replace([])
        for sequence in sequences:
            self.release(sequence)
        return sequences

    def advance(self, decoded: int, tokens: torch.Tensor) -> None:
        """Store the sampled tokens, [rows], FAILED included; the first `decoded` rows have cached one position."""
        self.positions[:decoded] += 1
        self.tokens[: len(tokens)] = tokens

    def _replace(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.features = features_of(sequences)


class CapturedSteps(Protocol):
    """Decode steps that were captured as CUDA graphs."""

    def step(self, decoding: int, prefilled: list[torch.Tensor]) -> torch.Tensor:
        """Replay a step: what `DecodeStep.run` specifies. If it raises, nothing has been stored."""


class DecodeStep:
    """Computes the next token of every row in use, by replayed CUDA graphs where there are any. Not thread-safe.

    The first `decoding` rows run a forward pass; the others have just been prefilled, and their last hidden states are
    passed in.
    """

    def __init__(self, model: ModelRunner, sampler: Sampler, batch: SlotBatch, isolation: Isolation) -> None:
        self._model, self._sampler, self._batch, self._isolation = model, sampler, batch, isolation
        self.graphs: CapturedSteps | None = None
        """Captured steps; None launches every kernel."""
        self._failed_replays = 0

    def run(self, decoding: int, prefilled: list[torch.Tensor]) -> torch.Tensor:
        """Return the next token of every row in use, [rows], and store it as the input of the row's next step.

        prefilled: hidden states, [rows, hidden] in all, of the rows behind the first `decoding`. FAILED stands for a
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
            self._isolation.record(error, f"replaying a step over {names_of(self._batch.sequences)}")
            self._failed_replays += 1
            if self._failed_replays == MAX_FAILED_REPLAYS:
                _log.error("%d consecutive replays failed; CUDA graphs are no longer used", MAX_FAILED_REPLAYS)
                self.graphs = None
            return None
        self._failed_replays = 0
        return tokens

    def _launch(self, decoding: int, prefilled: list[torch.Tensor]) -> torch.Tensor:
        """Compute the tokens of all rows in use, [rows]; where that fails, of halves of them."""
        batch = self._batch
        row_of = {sequence: row for row, sequence in enumerate(batch.sequences)}

        def compute(part: list[Sequence]) -> torch.Tensor:
            first = row_of[part[0]]
            last = first + len(part)
            hidden = []
            if first < decoding:
                rows = slice(first, min(last, decoding))
                span = max(sequence.num_cached for sequence in batch.sequences[rows]) + 1
                states = batch.kv_slots[rows], batch.tokens[rows], batch.positions[rows]
                hidden.append(self._model.decode(*states, span))
            if last > decoding:
                hidden.append(torch.cat(prefilled)[max(first - decoding, 0) : last - decoding])
            logits = self._model.logits(torch.cat(hidden))
            return self._sampler.sample(logits, first, part, batch.features)

        parts, failed = self._isolation.isolate("the next tokens", batch.sequences, compute)
        if not failed:
            return torch.cat(parts)
        tokens = torch.full_like(batch.tokens[: len(batch)], FAILED)
        computed = [row for sequence, row in row_of.items() if sequence not in failed]
        tokens[computed] = torch.cat([tokens[:0], *parts])
        return tokens
