"""Which slot samples how: the parameters of every row as tensors, and the step from logits to tokens.

The rows in use are the first ones, as in the cache. Work that no present row asks for (penalties, sorting, noise) is
left out; what a row gets never depends on what was left out or done for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from llama_engine.api.request_parser import GenerationRequest
from llama_engine.sampling.logits_processors import (
    apply_temperature,
    draw,
    keep_top_k_top_p,
    penalize_output,
    penalize_repetition,
)
from llama_engine.sampling.philox import step_keys
from llama_engine.text.bad_words import BadWords

FAILED = -1
"""In place of a token: the row's logits were not finite."""

_COLUMNS = ("temperature", "top_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


@dataclass(frozen=True)
class Needs:
    """What rows ask for beyond their best token. What nobody asks for changes nobody's token, so more is as good."""

    repetition: bool = False
    output_counts: bool = False
    noise: bool = False
    truncation: bool = False

    def cover(self, other: Needs) -> bool:
        """Return whether everything that `other` asks for is here too."""
        return all(mine or not theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True))


class Sampler:
    """Parameters and histories of `slots` rows over a vocabulary. Not thread-safe."""

    def __init__(self, slots: int, vocabulary: int, end_tokens: Sequence[int], device: torch.device) -> None:
        self._device = device
        self._vocabulary = vocabulary
        self._end_tokens = torch.tensor(sorted(end_tokens), dtype=torch.long, device=device)
        self._only_end = torch.full((vocabulary,), -torch.inf, device=device)
        self._only_end[self._end_tokens] = 0.0
        self._parameters = torch.ones(slots, len(_COLUMNS), device=device)
        self._top_k = torch.full((slots,), vocabulary, dtype=torch.long, device=device)
        self._in_prompt = torch.zeros(slots, vocabulary, dtype=torch.bool, device=device)
        self._counts = torch.zeros(slots, vocabulary, dtype=torch.int32, device=device)
        self._seeds = np.zeros(slots, dtype=np.uint64)
        self._requests: list[GenerationRequest] = []
        self.needs = Needs()
        """Of the present rows together."""
        self._is_end = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._is_end[self._end_tokens] = True
        # What a choice needs from the host, two random words and whether the row must not end yet: where it is put
        # together, and where the device reads it.
        self._ready = torch.zeros(slots, 3, dtype=torch.long, pin_memory=device.type == "cuda")
        self._staged = torch.zeros(slots, 3, dtype=torch.long, device=device)

    @staticmethod
    def bytes_for(slots: int, vocabulary: int) -> int:
        """Return the bytes of the histories: bool of the prompt, int32 counts of the completion."""
        return slots * vocabulary * 5

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        """Give the next slots to these requests."""
        first, last = len(self._requests), len(self._requests) + len(requests)
        parameters = [[getattr(request, name) for name in _COLUMNS] for request in requests]
        self._parameters[first:last] = torch.tensor(parameters, dtype=torch.float32, device=self._device)
        top_k = [min(request.top_k or self._vocabulary, self._vocabulary) for request in requests]
        self._top_k[first:last] = torch.tensor(top_k, device=self._device)
        self._seeds[first:last] = [request.seed for request in requests]
        self._counts[first:last] = 0
        self._in_prompt[first:last] = False
        for slot, request in enumerate(requests, first):
            if request.repetition_penalty != 1.0:
                self._in_prompt[slot, list(request.prompt_tokens)] = True
        # Last, so that a failure before it leaves the slots free.
        self._requests += requests
        self.needs = self._read_needs()

    def retire(self, slot: int) -> None:
        """Give a slot up: the last row moves into it."""
        last = self._requests.pop()
        if slot < len(self._requests):
            self._requests[slot] = last
            for state in (self._parameters, self._top_k, self._in_prompt, self._counts):
                state[slot] = state[len(self._requests)]
            self._seeds[slot] = self._seeds[len(self._requests)]
        self.needs = self._read_needs()

    def clear(self) -> None:
        """Give all slots up."""
        self._requests.clear()
        self.needs = self._read_needs()

    def sample(
        self, logits: torch.Tensor, first: int, steps: Sequence[int], banned: Sequence[BadWords | None]
    ) -> torch.Tensor:
        """Choose the next token of the slots `first` … and note it in their histories, last of all: until then a
        failure leaves everything as it was, and the same rows can be sampled again.

        logits: [rows, vocabulary], any float dtype. steps: tokens each row has already. banned: each row's bad
        words. Returns [rows], long; FAILED where a row's logits aren't finite.
        """
        rows = slice(first, first + logits.shape[0])
        needs = self.needs
        logits = self._mask(self._penalized(logits.float(), rows, needs), first, steps, banned)
        keys = torch.from_numpy(self._keys(rows, steps)).to(self._device) if needs.noise else None
        return self._chosen(logits, rows, needs, keys)

    def stage(self, steps: Sequence[int]) -> None:
        """Hand over what `choose` needs from the host for the first slots, in one copy that nobody waits for.

        steps: tokens each row has already. What was handed over before must have been used: the caller has seen the
        tokens that were chosen with it.
        """
        rows = slice(0, len(steps))
        ready = self._ready.numpy()
        if self.needs.noise:
            ready[rows, :2] = self._keys(rows, steps)
        ready[rows, 2] = [step < request.min_tokens for step, request in zip(steps, self._requests, strict=True)]
        self._staged[rows].copy_(self._ready[rows], non_blocking=True)

    def choose(self, logits: torch.Tensor, needs: Needs) -> torch.Tensor:
        """Do as `sample` for the first slots, without bad words, by tensors that stay where they are.

        What it does depends on the shape and on `needs` alone, so that it can be captured. logits: [slots, vocabulary]
        of as many slots as shall be looked at, free ones too; those choose something, and are none the worse for it.
        needs: covers `self.needs`.
        """
        rows = slice(0, logits.shape[0])
        logits = self._penalized(logits.float(), rows, needs)
        too_early = self._staged[rows, 2:] > 0
        logits = logits.masked_fill(too_early & self._is_end, -torch.inf)
        return self._chosen(logits, rows, needs, self._staged[rows, :2])

    def _keys(self, rows: slice, steps: Sequence[int]) -> NDArray[np.int64]:
        return step_keys(self._seeds[rows], np.asarray(steps, dtype=np.int64))

    def _penalized(self, logits: torch.Tensor, rows: slice, needs: Needs) -> torch.Tensor:
        _, _, repetition, frequency, presence = self._parameters[rows].unbind(1)
        if needs.repetition:
            seen = self._in_prompt[rows] | (self._counts[rows] > 0)
            # Only where it is asked for: it makes infinite logits finite, and a row that has such must fail alike
            # whoever is beside it.
            logits = penalize_repetition(logits, seen & (repetition != 1.0)[:, None], repetition)
        if needs.output_counts:
            logits = penalize_output(logits, self._counts[rows], frequency, presence)
        return logits

    def _chosen(self, logits: torch.Tensor, rows: slice, needs: Needs, keys: torch.Tensor | None) -> torch.Tensor:
        """Choose by logits that are penalized and masked; keys: [rows, 2], where anybody draws."""
        temperature, top_p, *_ = self._parameters[rows].unbind(1)
        best, tokens = logits.max(-1)
        if needs.noise:
            assert keys is not None, "a draw needs random words"
            sampled = temperature > 0
            warm = apply_temperature(logits, torch.where(sampled, temperature, 1.0))
            if needs.truncation:
                warm = keep_top_k_top_p(warm, self._top_k[rows], top_p)
            tokens = torch.where(sampled, draw(warm, keys), tokens)
        # A NaN anywhere makes the best one NaN; nothing left to choose from makes it -inf.
        chosen = torch.where(best.isfinite(), tokens, FAILED)
        if needs.repetition or needs.output_counts:
            self._counts[rows].scatter_add_(1, tokens[:, None], torch.ones_like(tokens[:, None], dtype=torch.int32))
        return chosen

    def _mask(
        self, logits: torch.Tensor, first: int, steps: Sequence[int], banned: Sequence[BadWords | None]
    ) -> torch.Tensor:
        too_early = [row for row, step in enumerate(steps) if step < self._requests[first + row].min_tokens]
        if not too_early and not any(words is not None for words in banned):
            return logits
        logits = logits.clone()
        if too_early and len(self._end_tokens):
            logits[torch.tensor(too_early, device=self._device)[:, None], self._end_tokens] = -torch.inf
        for row, words in enumerate(banned):
            if words is not None:
                logits[row, words.always] = -torch.inf
                logits[row, words.completing()] = -torch.inf
                # Where every token would complete a bad word the text can only end, even before min_tokens.
                stuck = logits[row].amax() == -torch.inf
                logits[row] = torch.where(stuck, self._only_end, logits[row])
        return logits

    def _read_needs(self) -> Needs:
        requests = self._requests
        return Needs(
            repetition=any(request.repetition_penalty != 1.0 for request in requests),
            output_counts=any(request.frequency_penalty or request.presence_penalty for request in requests),
            noise=any(request.temperature > 0 for request in requests),
            truncation=any(request.temperature > 0 and (request.top_k or request.top_p < 1) for request in requests),
        )
