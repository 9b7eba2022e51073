"""The batch of decoding sequences, with the state of each row: KV slot, last token, position, sampling state.

Rows in use are contiguous from row 0, so that a decode step reads views of the state tensors. `SlotBatch.remove` moves
the last row into the freed row. A sequence keeps its KV slot, a row of the page table, from prefill until it finishes
or is preempted: `kv_slots` maps rows to KV slots.
"""

from __future__ import annotations

import torch

from llama_engine.engine.page_manager import PageManager
from llama_engine.engine.sequence import Sequence
from llama_engine.sampling.state import SamplingFeatures, SamplingState, features_of
from llama_engine.transfer import to_device


class SlotBatch:
    """The decoding sequences and the state of their rows. Not thread-safe."""

    def __init__(self, slots: int, vocabulary: int, device: torch.device, pages: PageManager) -> None:
        """Allocate the state of `slots` rows. vocabulary: number of tokens. pages: of the KV cache."""
        self.slots = slots
        self._pages = pages
        self.sequences: list[Sequence] = []
        """The sequences by row."""
        self.sampling = SamplingState(slots, vocabulary, device)
        self.features = SamplingFeatures()
        """Sampling features that at least one sequence uses."""
        self.kv_slots = torch.arange(slots, device=device)
        """The KV slot of each row: [slots]."""
        self.tokens = torch.zeros(slots, dtype=torch.long, device=device)
        """The last token of each row, which its next decode step reads: [slots]."""
        self.positions = torch.zeros(slots, dtype=torch.long, device=device)
        """The position of that token: [slots]."""

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequences: list[Sequence]) -> None:
        """Add sequences with cached tokens to the next rows: PREFILL → DECODE.

        Errors of the device are passed on; the batch is then unchanged.
        """
        first, last = len(self.sequences), len(self.sequences) + len(sequences)
        states = [(sequence.kv_slot, sequence.num_cached) for sequence in sequences]
        self.kv_slots[first:last], self.positions[first:last] = to_device(states, self.positions.device).T
        self.sampling.set(first, sequences)
        # Last, after everything that can fail.
        self._replace([*self.sequences, *sequences])
        for sequence in sequences:
            sequence.start_decoding()

    def remove(self, row: int) -> None:
        """Free a row, its KV slot and pages, and move the last row's sequence into the row; keys and values stay.

        Errors of the device are passed on. The list of sequences changes last: if a copy fails, all other rows are
        still valid.
        """
        last = len(self.sequences) - 1
        removed, remaining = self.sequences[row], self.sequences[:last]
        if row != last:
            remaining[row] = self.sequences[last]
            self.sampling.copy(last, row)
            for state in (self.kv_slots, self.tokens, self.positions):
                state[row] = state[last]
        self._replace(remaining)
        self._pages.release(removed)

    def clear(self) -> None:
        """Free all rows, their KV slots and pages."""
        sequences = self.sequences
        self._replace([])
        for sequence in sequences:
            self._pages.release(sequence)

    def advance(self, decoded: int, tokens: torch.Tensor) -> None:
        """Store the sampled tokens, [rows], possibly FAILED, and advance the positions of the first `decoded` rows."""
        self.positions[:decoded] += 1
        self.tokens[: len(tokens)] = tokens

    def _replace(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.features = features_of(sequences)
