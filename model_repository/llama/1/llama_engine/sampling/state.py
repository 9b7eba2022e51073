"""The sampler's state of a batch: the features that its sequences use, their parameters and histories as tensors."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from llama_engine.kernels.transfers import to_device

if TYPE_CHECKING:
    from llama_engine.engine.sequence import Sequence

_PARAMETERS = ("temperature", "top_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "min_p")

BatchIndices = slice | list[int]
"""Indices into the batch: a slice, whose views of the state can be captured in a CUDA graph, or each one."""


@dataclass(frozen=True)
class SamplingFeatures:
    """Sampling features beyond greedy decoding that a batch uses. Enabling an unused feature changes no token."""

    repetition: bool = False
    output_counts: bool = False
    noise: bool = False
    truncation: bool = False
    min_p: bool = False
    processors: bool = False
    """Biases or masks of single sequences, by `LogitsProcessor`."""
    log_probs: bool = False

    def cover(self, other: SamplingFeatures) -> bool:
        """Return whether every feature of `other` is enabled here."""
        return all(mine or not theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True))


def features_of(sequences: list[Sequence]) -> SamplingFeatures:
    """Return the features that at least one of the sequences uses."""
    requests = [sequence.request for sequence in sequences]
    return SamplingFeatures(
        repetition=any(request.repetition_penalty != 1.0 for request in requests),
        output_counts=any(request.frequency_penalty or request.presence_penalty for request in requests),
        noise=any(request.temperature > 0 for request in requests),
        truncation=any(request.temperature > 0 and (request.top_k or request.top_p < 1) for request in requests),
        min_p=any(request.temperature > 0 and request.min_p for request in requests),
        processors=any(sequence.processor is not None for sequence in sequences),
        log_probs=any(request.needs_log_probs for request in requests),
    )


class SamplingState:
    """Sampling parameters and penalties' state (prompt-token masks, output-token counts) of up to `slots` sequences."""

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self.vocabulary = vocabulary
        self.parameters = torch.ones(slots, len(_PARAMETERS), device=device)
        """Sampling parameters of each sequence, a column for each name in _PARAMETERS: [batch, parameters]."""
        self.top_k = torch.full((slots,), vocabulary, dtype=torch.long, device=device)
        self.in_prompt = torch.zeros(slots, vocabulary, dtype=torch.bool, device=device)
        """Whether each token occurs in the prompt, for sequences with a repetition penalty: [batch, vocabulary]."""
        self.counts = torch.zeros(slots, vocabulary, dtype=torch.int32, device=device)
        """Number of occurrences of each token in the completion, for sequences with penalties: [batch, vocabulary]."""
        self.seeds = np.zeros(slots, dtype=np.uint64)

    def column(self, name: str, indices: BatchIndices) -> torch.Tensor:
        """Return the values of one of _PARAMETERS for these batch indices, [batch]."""
        return self.parameters[indices, _PARAMETERS.index(name)]

    def count(self, indices: BatchIndices, tokens: torch.Tensor) -> None:
        """Count a new token of each of these sequences, [batch], in its completion."""
        if isinstance(indices, slice):
            ones = torch.ones_like(tokens[:, None], dtype=torch.int32)
            self.counts[indices].scatter_add_(1, tokens[:, None], ones)
        else:
            self.counts[indices, tokens] += 1

    @staticmethod
    def bytes_for(slots: int, vocabulary: int) -> int:
        """Return the bytes of the token histories: bool for the prompt, int32 counts for the completion."""
        return slots * vocabulary * 5

    def set(self, first: int, sequences: list[Sequence]) -> None:
        """Set the parameters and histories of these sequences at the batch indices from `first` on.

        A sequence has generated tokens already if it was preempted, or if its request resumes another one.
        """
        last = first + len(sequences)
        requests = [sequence.request for sequence in sequences]
        device = self.parameters.device
        parameters = [[getattr(request, name) for name in _PARAMETERS] for request in requests]
        self.parameters[first:last] = to_device(parameters, device, torch.float32)
        top_k = [min(request.top_k or self.vocabulary, self.vocabulary) for request in requests]
        self.top_k[first:last] = to_device(top_k, device)
        self.seeds[first:last] = [request.seed for request in requests]
        self.counts[first:last] = 0
        self.in_prompt[first:last] = False
        for index, sequence in enumerate(sequences, first):
            request = sequence.request
            if request.repetition_penalty != 1.0:
                self.in_prompt[index, to_device(request.prompt_tokens, device, torch.long)] = True
            if sequence.output_tokens:
                output = to_device(sequence.output_tokens, device, torch.long)
                self.counts[index].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def copy(self, source: int, target: int) -> None:
        """Copy the state from batch index `source` to `target`."""
        for state in (self.parameters, self.top_k, self.in_prompt, self.counts):
            state[target] = state[source]
        self.seeds[target] = self.seeds[source]
