"""The exact INT8 product by PyTorch's oneDNN operators, for CPUs where the compiled kernels can't be used.

An activation row x is scale · q, and the integer q is one term or two of b bits each, from -h to h - 1, h = 2ᵇ⁻¹:

    q = 2ᵇ · high + low        Σ x·w = scale · weight scale · (2ᵇ · Σ high·w + Σ low·w)

Which rows have two terms is `ActivationTerms`' rule, on the one term of b bits. One product computes the rows with one
term and another one those with two, as uint8 with the zero point h. Their sums are exact in int32, also before the zero
point is subtracted: |Σ| ≤ inputs · (2ᵇ - 1) · 128. So a row's result has the same bits in any batch and with any number
of threads, and non-finite values affect only their own row.

Terms have 8 bits on processors with VNNI or AMX. On others the instruction that adds two products (vpmaddubsw)
silently saturates at 2¹⁵, so terms have 7 bits: 2 · 127 · 128 < 2¹⁵. Because a virtual machine or ONEDNN_MAX_CPU_ISA
can hide instructions, products are compared with exact integers, once per process and once per weight shape.

Source of one term: LLM.int8() without outliers, https://arxiv.org/abs/2208.07339.
"""

from __future__ import annotations

import functools
import logging

import torch

from llama_engine.errors import CheckpointError, one_line
from llama_engine.model.activation_terms import ONE_TERM, TWO_TERMS, ActivationTerms
from llama_engine.model.weights import LinearWeight

MAX_INPUTS = (2**31 - 1) // (255 * 128)
"""Maximum inputs of a layer for which sums can't overflow int32, for any INT8 weights: 65,793."""

_SMALLEST = 1e-30
"""Lower limit of a row's largest magnitude in quantization; the error for smaller rows is at most 1e-34 per value."""

_TO_INTEGER = 1.5 * 2.0**23
"""Adding this to a float below 2²² rounds it to the nearest integer, ties to even, in the lowest bits of the sum."""

_UNPADDED_ROWS = 32
_ROW_MULTIPLE = 16

_TRIAL_ROWS = (1, 2, 31, 64, 128)
"""Numbers of rows of terms with which a product is verified."""

_MAX_TRIAL_OUTPUTS = 8192
"""Upper limit of the outputs in a verification; an output's sums don't depend on the number of outputs."""

_TRIAL_WEIGHT_ROWS = 61
"""Number of distinct rows in a verification's weight; not a multiple of any kernel's block size."""

_log = logging.getLogger(__name__)


class OneDnnInt8Linear:
    """A linear layer y = x Wᵀ + b with exact integer sums. Thread-safe.

    Holds a packed copy of the weight and no reference to the original, so memory doubles until the caller drops that.
    terms: which rows have two terms. bits: bits per term, 7 or 8.
    """

    def __init__(self, weight: LinearWeight, terms: ActivationTerms, bits: int) -> None:
        assert weight.scales is not None, "the weight is not quantized"
        self.out_features, self.in_features = weight.weight.shape
        self.bits, self._terms = bits, terms
        self._product = IntegerProduct(weight.weight, weight.scales, bits)
        self._bias = None if weight.bias is None else weight.bias.float()

    def __call__(self, activations: torch.Tensor) -> torch.Tensor:
        """Return the layer's output [..., out] for activations [..., in], in their dtype."""
        rows = activations.reshape(-1, self.in_features).float()
        if self._terms in (ONE_TERM, TWO_TERMS):
            result = self._multiply(rows, 1 if self._terms == ONE_TERM else 2)
        else:
            result = torch.empty(len(rows), self.out_features)
            two = has_two_terms(rows, self._terms, self.bits)
            for terms, selected in ((1, ~two), (2, two)):
                if selected.any():
                    result[selected] = self._multiply(rows[selected], terms)
        if self._bias is not None:
            result.add_(self._bias)
        return result.to(activations.dtype).view(*activations.shape[:-1], self.out_features)

    def _multiply(self, rows: torch.Tensor, terms: int) -> torch.Tensor:
        """Return the scaled products [n, out] of rows [n, in] with as many terms."""
        stack, scales = quantize(rows, terms, self.bits)
        sums = self._product(stack).narrow(1, 0, len(rows)).unbind()
        # 2ᵇ · high is exact, so the addition rounds once, with or without a fused multiply-add.
        result = sums[0] if terms == 1 else torch.add(sums[1], sums[0], alpha=1 << self.bits)
        return result.mul_(scales)


class IntegerProduct:
    """The product of activation terms and an INT8 weight [out, in], of which it holds a copy packed for oneDNN.

    scales: [out], float32, multiply the sums of each output. bits: bits per term, 7 or 8.
    """

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
        self._zero_point, self._scales = 1 << (bits - 1), scales
        self._packed = torch.ops.onednn.qlinear_prepack.default(weight, None)
        self._weight_zero_points = torch.zeros(1, dtype=torch.int64)

    def __call__(self, terms: torch.Tensor) -> torch.Tensor:
        """Return the scaled sums [..., out] of terms [..., in]: rounded to float32, then multiplied by the scales."""
        sums: torch.Tensor = torch.ops.onednn.qlinear_pointwise.default(
            terms.view(-1, terms.shape[-1]),
            1.0,
            self._zero_point,
            self._packed,
            self._scales,
            self._weight_zero_points,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return sums.view(*terms.shape[:-1], len(self._scales))


class OneDnnPacker:
    """Creates the linear layers of one model from INT8 weights. terms: which activation rows have two terms."""

    def __init__(self, terms: ActivationTerms) -> None:
        self._terms, self._bits = terms, term_bits()

    def __call__(self, weight: LinearWeight) -> OneDnnInt8Linear:
        """Return the layer of a weight. The caller should then drop its references to the weight.

        Raises CheckpointError if the product isn't exact for the weight's shape.
        """
        self.check(weight)
        return OneDnnInt8Linear(weight, self._terms, self._bits)

    def check(self, weight: LinearWeight) -> None:
        """Raise CheckpointError if the product isn't exact for the weight's shape."""
        outputs, inputs = weight.weight.shape
        if reason := refusal(outputs, inputs, self._bits):
            raise CheckpointError(
                f"INT8 weights of {outputs} x {inputs} (outputs x inputs) have no exact product on this CPU: with "
                f"oneDNN {reason}; the log says why the compiled kernels aren't used"
            )

    def describe(self) -> str:
        """Return a description of the product, for the log and the metrics."""
        return f"exact INT8, {self._terms.describe()}, oneDNN with {self._bits}-bit terms"


def quantize(rows: torch.Tensor, terms: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows [n, in], float32; return terms [terms, n', in], uint8, high first, and scales [n, 1].

    n' ≥ n is `padded(n)`; padding rows have arbitrary values. The scale of a row that isn't finite is NaN. Every
    operation is exact or rounds once, so that a row's result doesn't depend on other rows.
    """
    half = 1 << (bits - 1)
    # largest: q with all terms at half - 1. offset: makes the terms of q + offset unsigned.
    largest, offset = (half - 1, half) if terms == 1 else ((half - 1) * (2 * half + 1), half * (2 * half + 1))
    scales = _scales(rows, largest)
    integers = (rows * scales.reciprocal()).add_(_TO_INTEGER + offset).view(torch.int32)
    stack = torch.empty((terms, padded(len(rows)), rows.shape[1]), dtype=torch.uint8)
    # A copy to uint8 keeps the lowest 8 bits.
    stack[-1, : len(rows)].copy_(integers if bits == 8 else integers & (2 * half - 1))
    if terms > 1:
        stack[0, : len(rows)].copy_(integers >> bits)
    return stack, scales


def has_two_terms(rows: torch.Tensor, terms: ActivationTerms, bits: int) -> torch.Tensor:
    """Return which rows [n, in], float32, have two terms, [n], bool. A row that isn't finite has one."""
    largest = (1 << (bits - 1)) - 1
    # Integers in float64: their sums are exact, and so don't depend on an order.
    squares = (rows * _scales(rows, largest).reciprocal()).round_().double().square_().sum(-1)
    return (squares > 0) & (squares < terms.limit(rows.shape[1], largest))


def _scales(rows: torch.Tensor, largest: int) -> torch.Tensor:
    """Return the scales [n, 1] with which the largest magnitude of each row is `largest`; NaN for non-finite rows."""
    # x + 0 · x turns infinity into NaN and leaves other values unchanged.
    scales = rows.abs().amax(-1, keepdim=True).clamp_(min=_SMALLEST)
    return scales.add_(scales, alpha=0).div_(largest)


def padded(rows: int) -> int:
    """Return the number of rows, padded for the product.

    oneDNN generates code for each number of rows (0.5 ms per shape). The few different numbers of decode steps are not
    padded; the many of prefills are rounded up to a few.
    """
    return rows if rows <= _UNPADDED_ROWS else -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE


@functools.cache
def term_bits() -> int:
    """Return the bits per term: 8 if a trial product of 8-bit terms is exact; else 7, and log a warning."""
    reason = refusal(256, 256, bits=8)
    if reason is None:
        return 8
    _log.warning("oneDNN's INT8 products have 7-bit terms, with 8 bits %s", reason)
    return 7


@functools.cache
def refusal(outputs: int, inputs: int, bits: int) -> str | None:
    """Return why products with weights of this shape can't be used; None if trial products are exact."""
    if inputs > MAX_INPUTS:
        return f"sums of more than {MAX_INPUTS} inputs leave int32"
    try:
        return _wrong_sums(min(outputs, _MAX_TRIAL_OUTPUTS + outputs % 64), inputs, bits)
    except Exception as error:  # noqa: BLE001 - PyTorch builds without the operator raise various exceptions
        return f"the product fails: {one_line(error)}"


def _wrong_sums(outputs: int, inputs: int, bits: int) -> str | None:
    """Compare products of random and extreme values with exact integers; return a difference in words, or None."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randint(-127, 128, (_TRIAL_WEIGHT_ROWS, inputs), dtype=torch.int8, generator=random)
    # Extreme values: the largest sums of both signs, and the pairs of products that saturate first.
    rows[0], rows[1] = 127, -127
    row_of_output = torch.arange(outputs) % _TRIAL_WEIGHT_ROWS
    scales = torch.rand(outputs, generator=random)
    half = 1 << (bits - 1)
    values = torch.randint(-half, half, (max(_TRIAL_ROWS), inputs), generator=random)
    values[0], values[1] = -half, half - 1
    stack = (values + half).to(torch.uint8)
    product = IntegerProduct(rows[row_of_output], scales, bits)
    # float64 holds every sum exactly.
    sums = (values.double() @ rows.double().T).float()
    for count in _TRIAL_ROWS:
        result, expected = product(stack[:count]), sums[:count, row_of_output] * scales
        if not torch.equal(result, expected):
            error = (result - expected).abs().max() / expected.abs().max()
            return f"sums of {count} rows are wrong by {error:.1%} of the largest"
    return None
