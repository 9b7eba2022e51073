"""The sequences that decode: all state per row.

It is behind `SlotBatch.add` and `remove`: KV slot, last token, position, sampling parameters and histories. The
rows in use are the first ones, so that a decode step reads views. A row finds its keys and values through a table: a
sequence keeps its KV slot from its prefill to its end, whatever row it is in.
"""

from __future__ import annotations

import torch

from llama_engine.sampling.sampling_state import SamplingFeatures, SamplingState, features_of
from llama_engine.sequence import Sequence
from llama_engine.transfer import to_device


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
        self.kv_slots[first:last], self.positions[first:last] = to_device(states, self.positions.device).T
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
