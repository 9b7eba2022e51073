"""Verifies the tokens of receipts: each is drawn again, from logits that one prefill of prompt and output gives."""

from __future__ import annotations

import torch

from llama_engine.events import Difference
from llama_engine.model.model_runner import ModelRunner
from llama_engine.sampling.sampler import FAILED, Sampler, failure_of
from llama_engine.sampling.sampling_state import SamplingFeatures, SamplingState, features_of
from llama_engine.sequence import Sequence
from llama_engine.text.tokenizer import Vocabulary


class Verifier:
    """Draws claimed tokens again. Not thread-safe."""

    def __init__(self, model: ModelRunner, vocabulary: Vocabulary, end_tokens: frozenset[int], rows: int) -> None:
        """rows: number of tokens whose logits are computed at once."""
        self._model, self._vocabulary, self._rows = model, vocabulary, rows
        self._state: SamplingState | None = None
        self._end_tokens = end_tokens

    def verify(self, sequence: Sequence, states: torch.Tensor) -> None:
        """Draw the next tokens of a sequence again; finish it at the first difference, and after the last token.

        states: hidden states of the positions before these tokens, [tokens, hidden].
        """
        if self._state is None:
            self._state = SamplingState(self._rows, len(self._vocabulary.token_bytes), states.device)
        sampler, features = Sampler(self._state, self._end_tokens), features_of([sequence])
        for block in torch.split(states, self._rows):
            logits = self._model.logits(block)
            # A logits processor has a state, which each token changes.
            rows = 1 if sequence.processor is not None else len(logits)
            for part in torch.split(logits, rows):
                for token, row in zip(self._draw(sampler, sequence, part, features), part, strict=True):
                    self._compare(sequence, token, row)
                    if sequence.result is not None:
                        return

    def _draw(
        self, sampler: Sampler, sequence: Sequence, logits: torch.Tensor, features: SamplingFeatures
    ) -> list[int]:
        """Return the tokens drawn from the logits of a sequence's next positions, [tokens, vocabulary]."""
        assert self._state is not None
        first, sequences = sequence.num_output_tokens, [sequence] * len(logits)
        self._state.set(0, sequences)
        if features.repetition or features.output_counts:
            for row, token in enumerate(sequence.request.claimed_ids[first : first + len(logits) - 1], 1):
                self._state.counts[row : len(logits), token] += 1
        drawn: list[int] = sampler.sample(logits, 0, sequences, features, range(first, first + len(logits))).tolist()
        return drawn

    def _compare(self, sequence: Sequence, drawn: int, logits: torch.Tensor) -> None:
        claimed = sequence.request.claimed_ids[sequence.num_output_tokens]
        if drawn == FAILED:
            sequence.finish(failure_of(sequence))
        elif drawn == claimed:
            sequence.confirm(self._vocabulary.token_bytes[claimed])
        else:
            sequence.differ(Difference(claimed, float(logits[claimed]), drawn, float(logits[drawn])))
