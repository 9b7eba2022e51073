"""Which activations have two 8-bit terms in exact INT8 products: `ActivationTerms`.

A token is here its activations, the input of one linear layer: a scale times integers q = low + 254 · high, with both
terms from -127 to 127. Only the token's outliers have a high term. They are the values above `int8_outlier_ratio` (the
setting) times its other values' mean magnitude, and the scale is that of the largest of these others. So outliers have
15 bits, and the others have 8 bits that outliers don't coarsen. `largest_inlier` (cpu/quantize.h) finds them. On a GPU
all activations have the same number of terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class TermCount(NamedTuple):
    """Tokens of a linear layer, their columns with two terms, and the layer's size.

    A column counts if it or one of the three beside it is an outlier: they are multiplied together.
    """

    tokens: int
    outlier_columns: int
    inputs: int
    outputs: int

    @property
    def products(self) -> int:
        """The number of products of a weight and an 8-bit term."""
        return (self.tokens * self.inputs + self.outlier_columns) * self.outputs


DECODER_LINEARS = ("query_key_value", "attention_output", "gate_up", "down")
"""The linear layers of a decoder layer, in the order of the compiled kernels' tables (LinearLayer in cpu/model.h)."""

LINEAR_LAYERS = (*DECODER_LINEARS, "head")

TermCounts = Mapping[str, TermCount]
"""Counts by name of LINEAR_LAYERS, of all decoder layers together."""

SPLIT = 254
"""Weight of the high term: a quantized activation is q = low + SPLIT · high."""

MAX_INPUTS = 2**31 // (127 * 128)
"""Maximum inputs of a layer, 132,104: a sum of this many products of a term and a weight always fits int32."""


@dataclass(frozen=True)
class ActivationTerms:
    """Which activations are outliers: those above `outlier_ratio` times the mean magnitude of others.

    0 is all, infinity none.
    """

    outlier_ratio: float

    def describe(self) -> str:
        """Return the rule in words, for the log and the metrics."""
        if not self.outlier_ratio:
            return "two terms"
        if math.isinf(self.outlier_ratio):
            return "one term"
        return f"two terms for outliers (ratio {self.outlier_ratio:g})"


TWO_TERMS = ActivationTerms(0.0)
ONE_TERM = ActivationTerms(math.inf)


def activation_terms(setting: str, outlier_ratio: float) -> ActivationTerms:
    """Return the rule of the settings `int8_terms` (auto, 1 or 2) and `int8_outlier_ratio`, which auto uses."""
    return {"1": ONE_TERM, "2": TWO_TERMS, "auto": ActivationTerms(outlier_ratio)}[setting]
