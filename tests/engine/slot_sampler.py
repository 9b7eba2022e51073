"""A sampler over a slot batch, without a model: tests give it the logits."""

from collections.abc import Sequence as Ordered

import torch
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.model.kv_cache import KVCacheShape
from llama_engine.sampling.sampler import Sampler
from llama_engine.sequence import Sequence
from llama_engine.slot_batch import SlotBatch
from llama_engine.text.bad_words import BadWords
from llama_engine.text.stop_checker import StopChecker

CPU = torch.device("cpu")


class SlotSampler:
    """Sequences that never finish, in the order of their slots, and the sampler of their tokens."""

    def __init__(self, slots: int, vocabulary: int, end_tokens: Ordered[int]) -> None:
        self.batch = SlotBatch(KVCacheShape(1, slots, 1, 1, 1, torch.float32), vocabulary, CPU)
        self._sampler = Sampler(self.batch.sampling, end_tokens)

    def add(self, request: GenerationRequest, bad_words: BadWords | None = None) -> Sequence:
        stop_checker = StopChecker(min_tokens=0, max_tokens=1 << 30, stop_words=[], end_tokens=[])
        sequence = Sequence(request, stop_checker, bad_words)
        self.batch.add([sequence])
        return sequence

    def step(self, logits: torch.Tensor, first: int = 0) -> list[int]:
        """Sample a token for each sequence from slot `first` on. logits: [rows, vocabulary] of these."""
        sequences = self.batch.sequences[first:]
        tokens = self._sampler.sample(logits, first, sequences, self.batch.features).tolist()
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.append(token, b"")
        return [int(token) for token in tokens]
