"""The number of 8-bit terms of each token in exact INT8 products: `ActivationTerms`.

A token is here its activations, the input of one linear layer. Its high terms are its values, scaled to -127 … 127 and
rounded; its low terms hold what that rounding lost. It needs low terms if its largest value is an outlier, because then
the other values' high terms are small. The token's crest factor, its largest magnitude over its root mean square,
measures that. It is computed from the high terms: a function of integers, whose sum no order or instruction set
changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class TermCount(NamedTuple):
    """Tokens in a linear layer, those of them with two terms, and the number of weights of one such layer."""

    tokens: int
    two_terms: int
    weights: int


TermCounts = Mapping[str, TermCount]
"""Counts by linear layer: query_key_value, attention_output, gate_up, down, head; of all decoder layers together."""

MAX_HIGH = 127
"""Largest magnitude of a high term, that of the token's largest value."""

SPLIT = 254
"""Weight of the high term: a quantized activation of two terms is q = SPLIT · high + low."""

MAX_INPUTS = 2**31 // (127 * 128)
"""Maximum inputs of a layer, 132,104: a sum of this many products of a term and a weight always fits int32."""


@dataclass(frozen=True)
class ActivationTerms:
    """Which tokens have two terms: those with a crest factor above `outlier_ratio`; 0 is all tokens, infinity none."""

    outlier_ratio: float

    def limit(self, inputs: int) -> float:
        """Return the limit of a token's Σ high²: it has two terms if its sum is greater than 0 and less than this.

        inputs: number of inputs of the linear layer.
        """
        return MAX_HIGH**2 * inputs / self.outlier_ratio**2 if self.outlier_ratio else math.inf

    def describe(self) -> str:
        """Return the rule in words, for the log and the metrics."""
        if not self.outlier_ratio:
            return "two terms"
        if math.isinf(self.outlier_ratio):
            return "one term"
        return f"two terms for outlier tokens (ratio {self.outlier_ratio:g})"


TWO_TERMS = ActivationTerms(0.0)
ONE_TERM = ActivationTerms(math.inf)


def activation_terms(setting: str, outlier_ratio: float) -> ActivationTerms:
    """Return the rule of the settings `int8_terms` (auto, 1 or 2) and `int8_outlier_ratio`, which auto uses."""
    return {"1": ONE_TERM, "2": TWO_TERMS, "auto": ActivationTerms(outlier_ratio)}[setting]
