"""Products of integer terms with INT8 weights through oneDNN: the sums are int32 and exact.

An activation row x is scale · q, and the integer q is one term or two of b bits each, from -h to h - 1, h = 2ᵇ⁻¹:

    q = 2ᵇ · high + low        Σ x·w = scale · weight scale · (2ᵇ · Σ high·w + Σ low·w)

All terms of all rows are the rows of one product. Which form of the terms is exact and fast depends on the processor:

- 8 bits, signed: where there is AMX. Elsewhere oneDNN has only a reference kernel for it, some 100 times slower.
- 8 bits, unsigned with zero point 128: where there is VNNI or AMX. Elsewhere the instruction that adds two products
  (vpmaddubsw) saturates at 2¹⁵, silently: 2 · 255 · 127 is more.
- 7 bits, unsigned with zero point 64: exact everywhere, because 2 · 127 · 128 < 2¹⁵.

|Σ| ≤ inputs · (2ᵇ - 1) · 128, also before the zero point is subtracted: it fits int32 up to MAX_INPUTS.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_INPUTS = (2**31 - 1) // (255 * 128)
"""Inputs of a layer up to which no sum leaves int32, for any INT8 weights: 65,793."""

_SMALLEST = 1e-30
"""Rows whose largest value is smaller are quantized as if this were it; the error is at most 1e-34 a value."""

_TO_INTEGER = 1.5 * 2.0**23
"""Adding this rounds a float below 2²² to the nearest integer, ties to even, which is then its lowest bits."""

_BYTE = 8
_UNPADDED_ROWS = 32
_ROW_MULTIPLE = 16


@dataclass(frozen=True)
class Form:
    """How terms are passed to oneDNN: `bits` each, as int8 or as uint8 with a zero point."""

    bits: int
    signed: bool = False

    @property
    def zero_point(self) -> int:
        """The uint8 that stands for 0; 0 for int8."""
        return 0 if self.signed else 1 << (self.bits - 1)

    def __str__(self) -> str:
        return f"{'signed' if self.signed else 'unsigned'} {self.bits}-bit terms"

    def split(self, rows: torch.Tensor, terms: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize rows [n, in], float32; return their terms and scales [n, 1], the scale NaN if a row isn't finite.

        The terms are [terms, n', in], uint8 or int8, high first; n' ≥ n is n padded with arbitrary values. Every
        operation is exact or rounds once, so that a row's result doesn't depend on its place or its neighbours.
        """
        half = 1 << (self.bits - 1)
        # The largest q with all terms at half - 1, and what makes the terms of q + offset unsigned.
        limit, offset = (half - 1, half) if terms == 1 else ((half - 1) * (2 * half + 1), half * (2 * half + 1))
        # x + 0 · x: infinity becomes NaN, everything else stays.
        scales = rows.abs().amax(-1, keepdim=True).clamp_(min=_SMALLEST)
        scales.add_(scales, alpha=0).div_(limit)
        integers = (rows * scales.reciprocal()).add_(_TO_INTEGER + offset).view(torch.int32)
        stack = torch.empty((terms, padded(len(rows)), rows.shape[1]), dtype=torch.uint8)
        low, high = stack[-1, : len(rows)], stack[0, : len(rows)]
        # A copy to uint8 keeps the lowest 8 bits.
        low.copy_(integers if terms == 1 or self.bits == _BYTE else integers & (2 * half - 1))
        if terms > 1:
            high.copy_(integers >> self.bits)
        return (stack.bitwise_xor_(half).view(torch.int8) if self.signed else stack), scales


SIGNED, UNSIGNED, NARROW = Form(8, signed=True), Form(8), Form(7)


def padded(rows: int) -> int:
    """Return the number of rows with which a product is computed.

    oneDNN generates code for each number of rows (0.5 ms a shape): a decode step's few numbers stay as they are, a
    prefill's many become few.
    """
    return rows if rows <= _UNPADDED_ROWS else -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE


class IntegerProduct:
    """Terms times an INT8 weight [out, in], packed for oneDNN: a copy, which takes one byte a weight.

    scales: [out], float32, by which the sums of each output are multiplied.
    """

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, form: Form) -> None:
        self._form, self._scales = form, scales
        self._packed = torch.ops.onednn.qlinear_prepack.default(weight, None)
        self._zero_points = torch.zeros(1, dtype=torch.int64)

    def __call__(self, terms: torch.Tensor) -> torch.Tensor:
        """Return the sums [..., out], each rounded to float32 once and once more by its scale, of terms [..., in]."""
        sums: torch.Tensor = torch.ops.onednn.qlinear_pointwise.default(
            terms.view(-1, terms.shape[-1]),
            1.0,
            self._form.zero_point,
            self._packed,
            self._scales,
            self._zero_points,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return sums.view(*terms.shape[:-1], len(self._scales))
