"""All state per slot, behind add() and remove(): KV cache, last token, position, sampling parameters and histories.

The sequences that decode occupy the first slots, so that a decode step reads views.
"""

from __future__ import annotations

import torch

from llama_engine.model.kv_cache import KVCache, KVCacheShape
from llama_engine.sampling.sampler import SamplingFeatures, SamplingState, features_of
from llama_engine.sequence import Sequence


class SlotBatch:
    """The sequences that decode, and the state of their slots. Not thread-safe."""

    def __init__(self, shape: KVCacheShape, vocabulary: int, device: torch.device) -> None:
        """Allocate the state of `shape.slots` slots. vocabulary: number of tokens."""
        self.sequences: list[Sequence] = []
        """The sequence in each slot in use."""
        self.kv_cache = KVCache(shape, device)
        self.sampling = SamplingState(shape.slots, vocabulary, device)
        self.features = SamplingFeatures()
        """Sampling features that any of the sequences asks for."""
        self.tokens = torch.zeros(shape.slots, 1, dtype=torch.long, device=device)
        """The last token of each slot, which its next decode step reads: [slots, 1]."""
        self.positions = torch.zeros(shape.slots, 1, dtype=torch.long, device=device)
        """The position of that token: [slots, 1]."""

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequences: list[Sequence]) -> None:
        """Add sequences whose prompts are cached in the next slots: PREFILL → DECODE.

        Raises what the device raises; the slots are then still free.
        """
        first, last = len(self.sequences), len(self.sequences) + len(sequences)
        lengths = [sequence.num_cached for sequence in sequences]
        self.positions[first:last, 0] = torch.tensor(lengths, device=self.positions.device)
        self.sampling.set(first, [sequence.request for sequence in sequences])
        # After everything that can fail: until here the slots are still free.
        self._replace([*self.sequences, *sequences])
        for sequence in sequences:
            sequence.start_decoding()

    def remove(self, slot: int) -> None:
        """Free a slot: the sequence in the last slot moves into it.

        Raises what the device raises. The list of sequences changes last: if a copy fails, every other sequence is
        still complete in its slot.
        """
        last = len(self.sequences) - 1
        remaining = self.sequences[:last]
        if slot != last:
            moving = remaining[slot] = self.sequences[last]
            self.kv_cache.copy(last, slot, moving.num_cached)
            self.sampling.copy(last, slot)
            self.tokens[slot] = self.tokens[last]
            self.positions[slot] = self.positions[last]
        self._replace(remaining)

    def clear(self) -> list[Sequence]:
        """Free all slots; return the sequences that were in them."""
        sequences = self.sequences
        self._replace([])
        return sequences

    def advance(self, decoded: int, tokens: torch.Tensor) -> None:
        """Store the sampled tokens, [rows], FAILED included; the first `decoded` slots have cached one position."""
        self.positions[:decoded] += 1
        self.tokens[: len(tokens), 0] = tokens

    def _replace(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.features = features_of(sequence.request for sequence in sequences)
