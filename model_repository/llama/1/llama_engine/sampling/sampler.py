"""Sample the next token of every slot, each by its own parameters.

Work that no sequence asks for (penalties, sorting, noise) is skipped; a row's token never depends on what was skipped
or computed for the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from llama_engine.api.request_parser import GenerationRequest
from llama_engine.sampling.exponential_race import draw_on_cpu
from llama_engine.sampling.logits_processors import (
    apply_temperature,
    draw,
    keep_top_k_top_p,
    penalize_output,
    penalize_repetition,
)
from llama_engine.sampling.philox import step_keys
from llama_engine.sequence import Sequence

FAILED = -1
"""In place of a token: the row's logits were not finite."""

_PARAMETERS = ("temperature", "top_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


@dataclass(frozen=True)
class SamplingFeatures:
    """What rows ask for beyond their most likely token. Enabling an unused feature changes no token."""

    repetition: bool = False
    output_counts: bool = False
    noise: bool = False
    truncation: bool = False

    def cover(self, other: SamplingFeatures) -> bool:
        """Return whether every feature of `other` is enabled here."""
        return all(mine or not theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True))


def features_of(requests: Iterable[GenerationRequest]) -> SamplingFeatures:
    """Return the features that any of these requests asks for."""
    requests = list(requests)
    return SamplingFeatures(
        repetition=any(request.repetition_penalty != 1.0 for request in requests),
        output_counts=any(request.frequency_penalty or request.presence_penalty for request in requests),
        noise=any(request.temperature > 0 for request in requests),
        truncation=any(request.temperature > 0 and (request.top_k or request.top_p < 1) for request in requests),
    )


class SamplingState:
    """Sampling parameters and token histories of `slots` slots over a vocabulary, as tensors."""

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self.vocabulary = vocabulary
        self.parameters = torch.ones(slots, len(_PARAMETERS), device=device)
        """One column for each of _PARAMETERS: [slots, parameters]."""
        self.top_k = torch.full((slots,), vocabulary, dtype=torch.long, device=device)
        self.in_prompt = torch.zeros(slots, vocabulary, dtype=torch.bool, device=device)
        """Whether the prompt has the token, for slots with a repetition penalty: [slots, vocabulary]."""
        self.counts = torch.zeros(slots, vocabulary, dtype=torch.int32, device=device)
        """How often the completion has the token, for slots sampled with penalties: [slots, vocabulary]."""
        self.seeds = np.zeros(slots, dtype=np.uint64)

    @staticmethod
    def bytes_for(slots: int, vocabulary: int) -> int:
        """Return the bytes of the histories: bool for the prompt, int32 counts for the completion."""
        return slots * vocabulary * 5

    def set(self, first: int, requests: list[GenerationRequest]) -> None:
        """Reset the slots `first` … to these requests."""
        last = first + len(requests)
        device = self.parameters.device
        parameters = [[getattr(request, name) for name in _PARAMETERS] for request in requests]
        self.parameters[first:last] = torch.tensor(parameters, dtype=torch.float32, device=device)
        top_k = [min(request.top_k or self.vocabulary, self.vocabulary) for request in requests]
        self.top_k[first:last] = torch.tensor(top_k, device=device)
        self.seeds[first:last] = [request.seed for request in requests]
        self.counts[first:last] = 0
        self.in_prompt[first:last] = False
        for slot, request in enumerate(requests, first):
            if request.repetition_penalty != 1.0:
                self.in_prompt[slot, list(request.prompt_tokens)] = True

    def copy(self, source: int, target: int) -> None:
        """Copy slot `source` to slot `target`."""
        for state in (self.parameters, self.top_k, self.in_prompt, self.counts):
            state[target] = state[source]
        self.seeds[target] = self.seeds[source]


class Sampler:
    """Turns logits into tokens. Not thread-safe."""

    def __init__(self, state: SamplingState, end_tokens: Iterable[int]) -> None:
        self._state = state
        self._device = device = state.parameters.device
        self._end_tokens = torch.tensor(sorted(end_tokens), dtype=torch.long, device=device)
        self._only_end = torch.full((state.vocabulary,), -torch.inf, device=device)
        self._only_end[self._end_tokens] = 0.0
        self.is_end = torch.zeros(state.vocabulary, dtype=torch.bool, device=device)
        """Which tokens end a text: [vocabulary]."""
        self.is_end[self._end_tokens] = True

    def sample(
        self, logits: torch.Tensor, first: int, sequences: list[Sequence], features: SamplingFeatures
    ) -> torch.Tensor:
        """Sample the next token of the slots `first` … and count it in their histories, which is the last thing done:
        after a failure before that, the same rows can be sampled again.

        logits: [rows, vocabulary], any float dtype. sequences: of these slots. features: cover those of the sequences.
        Returns [rows], long; FAILED where a row's logits aren't finite.
        """
        rows = slice(first, first + len(sequences))
        logits = self._mask(self.penalize(logits.float(), rows, features), sequences)
        keys = torch.from_numpy(self.keys(first, sequences)).to(self._device) if features.noise else None
        return self.select(logits, rows, features, keys)

    def keys(self, first: int, sequences: list[Sequence]) -> NDArray[np.int64]:
        """Return the random words of the next draw of the slots `first` …: [rows, 2]."""
        steps = np.asarray([sequence.num_output_tokens for sequence in sequences], dtype=np.int64)
        return step_keys(self._state.seeds[first : first + len(sequences)], steps)

    def penalize(self, logits: torch.Tensor, rows: slice, features: SamplingFeatures) -> torch.Tensor:
        """Apply the repetition, frequency and presence penalties to the logits, [rows, vocabulary], of these slots."""
        if not features.repetition and not features.output_counts:
            return logits
        state = self._state
        _, _, repetition, frequency, presence = state.parameters[rows].unbind(1)
        if features.repetition:
            seen = state.in_prompt[rows] | (state.counts[rows] > 0)
            # Only rows that ask for it: the penalty makes infinite logits finite, and a row that has such must fail
            # whatever its neighbours ask for.
            logits = penalize_repetition(logits, seen & (repetition != 1.0)[:, None], repetition)
        if features.output_counts:
            logits = penalize_output(logits, state.counts[rows], frequency, presence)
        return logits

    def select(
        self, logits: torch.Tensor, rows: slice, features: SamplingFeatures, keys: torch.Tensor | None
    ) -> torch.Tensor:
        """Choose tokens, [rows], by penalized and masked logits, and count them. keys: [rows, 2], where a row draws.

        Depends on shapes and `features` alone, so that it can be captured in a CUDA graph.
        """
        best, tokens = _best(logits)
        # A NaN anywhere makes the maximum NaN; a row whose tokens are all masked has a maximum of -inf.
        finite = best.isfinite()
        if features.noise:
            assert keys is not None, "a draw needs random words"
            tokens = self._draw(logits, tokens, finite, rows, features, keys)
        selected = torch.where(finite, tokens, FAILED)
        if features.repetition or features.output_counts:
            self._state.counts[rows].scatter_add_(
                1, tokens[:, None], torch.ones_like(tokens[:, None], dtype=torch.int32)
            )
        return selected

    def _draw(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        finite: torch.Tensor,
        rows: slice,
        features: SamplingFeatures,
        keys: torch.Tensor,
    ) -> torch.Tensor:
        """Return the tokens, [rows], with a draw in place of those of rows with a temperature.

        finite: [rows], whose draw matters.
        """
        temperature, top_p, *_ = self._state.parameters[rows].unbind(1)
        top_k, sampled = self._state.top_k[rows], temperature > 0
        if on_cpu(logits):
            drawing = (sampled & finite).nonzero()[:, 0]
            if len(drawing) == len(logits):
                return draw_on_cpu(logits, temperature, top_k, top_p, keys)
            if len(drawing):
                asked = (of_all[drawing] for of_all in (logits, temperature, top_k, top_p, keys))
                tokens[drawing] = draw_on_cpu(*asked)
            return tokens
        warm = apply_temperature(logits, torch.where(sampled, temperature, 1.0))
        if features.truncation:
            warm = keep_top_k_top_p(warm, top_k, top_p)
        return torch.where(sampled, draw(warm, keys), tokens)

    def _mask(self, logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
        """Mask end tokens before min_tokens, and the tokens that would complete a bad word."""
        too_early = [
            row for row, sequence in enumerate(sequences) if sequence.num_output_tokens < sequence.request.min_tokens
        ]
        if not too_early and not any(sequence.bad_words is not None for sequence in sequences):
            return logits
        logits = logits.clone()
        if too_early and len(self._end_tokens):
            logits[torch.tensor(too_early, device=self._device)[:, None], self._end_tokens] = -torch.inf
        for row, sequence in enumerate(sequences):
            if sequence.bad_words is not None:
                logits[row, sequence.bad_words.always] = -torch.inf
                logits[row, sequence.bad_words.completing()] = -torch.inf
                # Where every token would complete a bad word, the text can only end, even before min_tokens.
                stuck = logits[row].amax() == -torch.inf
                logits[row] = torch.where(stuck, self._only_end, logits[row])
        return logits


def on_cpu(logits: torch.Tensor) -> bool:
    """Return whether the host may look at the logits without waiting for a device."""
    return logits.device.type == "cpu"


def _best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's greatest logit, NaN where there is one, and the first token that has it: both [rows]."""
    if not on_cpu(logits):
        best, tokens = logits.max(-1)
        return best, tokens
    # NumPy's is vectorized, PyTorch's is not: 0.05 and 0.3 ms for 32 rows of 32,000 tokens.
    tokens = torch.from_numpy(logits.numpy().argmax(-1))
    return logits.gather(-1, tokens[:, None])[:, 0], tokens
