"""The exact INT8 product of PyTorch, by oneDNN: for a CPU where the compiled kernels aren't built or don't verify.

An activation row x is scale · q, and the integer q is one term or two of b bits each, from -h to h - 1, h = 2ᵇ⁻¹:

    q = 2ᵇ · high + low        Σ x·w = scale · weight scale · (2ᵇ · Σ high·w + Σ low·w)

All terms of all rows are the rows of one product, as uint8 with the zero point h. Its sums are int32 and exact: |Σ| ≤
inputs · (2ᵇ - 1) · 128, before the zero point is subtracted, too. So rows are independent: each one's result is the
same alone, in any batch and with any number of threads, and values that aren't finite stay in their row.

Terms have 8 bits where the processor has VNNI or AMX. Elsewhere the instruction that adds two products (vpmaddubsw)
saturates at 2¹⁵, silently, and terms have 7 bits: 2 · 127 · 128 < 2¹⁵. Products are tried and compared with exact
integers, once for the process and once for each shape of weight: a virtual machine or ONEDNN_MAX_CPU_ISA can hide
instructions.

Source of one term: LLM.int8() without outliers, https://arxiv.org/abs/2208.07339.
"""

from __future__ import annotations

import functools
import logging

import torch

from llama_engine.errors import CheckpointError, one_line
from llama_engine.model.weights import LinearWeight

MAX_INPUTS = (2**31 - 1) // (255 * 128)
"""Inputs of a layer up to which no sum leaves int32, for any INT8 weights: 65,793."""

_SMALLEST = 1e-30
"""Rows whose largest value is smaller are quantized as if this were it; the error is at most 1e-34 a value."""

_TO_INTEGER = 1.5 * 2.0**23
"""Adding this rounds a float below 2²² to the nearest integer, ties to even, which is then its lowest bits."""

_UNPADDED_ROWS = 32
_ROW_MULTIPLE = 16

_TRIAL_ROWS = (1, 2, 31, 64)
"""Numbers of activation rows that are verified."""

_MAX_TRIAL_OUTPUTS = 8192
"""Outputs that are verified, and a rest: an output's sums don't depend on how many there are."""

_TRIAL_WEIGHT_ROWS = 61
"""Different rows in a weight that is verified; no multiple of a block of any kernel."""

_log = logging.getLogger(__name__)


class OneDnnInt8Linear:
    """y = x Wᵀ + b in exact integer sums. Thread-safe.

    Keeps a packed copy of the weight, one byte each, and no reference to the original: making a layer takes the
    weight's size once more until its owner drops it. terms: 1 or 2, of an activation. bits: of a term, 7 or 8.
    """

    def __init__(self, weight: LinearWeight, terms: int, bits: int) -> None:
        assert weight.scales is not None, "the weight is not quantized"
        self.out_features, self.in_features = weight.weight.shape
        self.bits, self._terms = bits, terms
        self._product = IntegerProduct(weight.weight, weight.scales.float() / 127.0, bits)
        self._bias = None if weight.bias is None else weight.bias.float()

    def __call__(self, activations: torch.Tensor) -> torch.Tensor:
        """Return [..., out] of [..., in], in the dtype of the activations."""
        rows = activations.reshape(-1, self.in_features).float()
        terms, scales = quantize(rows, self._terms, self.bits)
        sums = self._product(terms).narrow(1, 0, len(rows)).unbind()
        # 2ᵇ · high is exact, so that this rounds once, with and without a fused multiply-add.
        result = sums[0] if self._terms == 1 else torch.add(sums[1], sums[0], alpha=1 << self.bits)
        result.mul_(scales)
        if self._bias is not None:
            result.add_(self._bias)
        return result.to(activations.dtype).view(*activations.shape[:-1], self.out_features)


class IntegerProduct:
    """Terms of `bits` bits times an INT8 weight [out, in], packed for oneDNN: a copy, which takes one byte a weight.

    scales: [out], float32, by which the sums of each output are multiplied.
    """

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
        self._zero_point, self._scales = 1 << (bits - 1), scales
        self._packed = torch.ops.onednn.qlinear_prepack.default(weight, None)
        self._weight_zero_points = torch.zeros(1, dtype=torch.int64)

    def __call__(self, terms: torch.Tensor) -> torch.Tensor:
        """Return the sums [..., out], each rounded to float32 once and once more by its scale, of terms [..., in]."""
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
    """Makes the linear layers of one model from INT8 weights. terms: 1 or 2, of an activation."""

    def __init__(self, terms: int) -> None:
        if terms not in (1, 2):
            raise ValueError(f"terms is {terms}, not 1 or 2")
        self._terms, self._bits = terms, term_bits()

    def __call__(self, weight: LinearWeight) -> OneDnnInt8Linear:
        """Return the layer of a weight. The caller drops its references to the weight afterwards.

        Raises CheckpointError for a shape whose product isn't exact.
        """
        outputs, inputs = weight.weight.shape
        if reason := refusal(outputs, inputs, self._terms, self._bits):
            raise CheckpointError(
                f"INT8 weights of {outputs} x {inputs} (outputs x inputs) have no exact product on this CPU: with "
                f"oneDNN {reason}; the log says why the compiled kernels aren't used"
            )
        return OneDnnInt8Linear(weight, self._terms, self._bits)

    def describe(self) -> str:
        """Name the product, for the log and the status."""
        return f"exact INT8, {('one term', 'two terms')[self._terms - 1]}, oneDNN with {self._bits}-bit terms"


def quantize(rows: torch.Tensor, terms: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows [n, in], float32; return their terms and scales [n, 1], the scale NaN if a row isn't finite.

    The terms are [terms, n', in], uint8, high first; n' ≥ n is n padded with arbitrary values. Every operation is exact
    or rounds once, so that a row's result doesn't depend on its place or its neighbours.
    """
    half = 1 << (bits - 1)
    # The largest q with all terms at half - 1, and what makes the terms of q + offset unsigned.
    limit, offset = (half - 1, half) if terms == 1 else ((half - 1) * (2 * half + 1), half * (2 * half + 1))
    # x + 0 · x: infinity becomes NaN, everything else stays.
    scales = rows.abs().amax(-1, keepdim=True).clamp_(min=_SMALLEST)
    scales.add_(scales, alpha=0).div_(limit)
    integers = (rows * scales.reciprocal()).add_(_TO_INTEGER + offset).view(torch.int32)
    stack = torch.empty((terms, padded(len(rows)), rows.shape[1]), dtype=torch.uint8)
    # A copy to uint8 keeps the lowest 8 bits.
    stack[-1, : len(rows)].copy_(integers if bits == 8 else integers & (2 * half - 1))
    if terms > 1:
        stack[0, : len(rows)].copy_(integers >> bits)
    return stack, scales


def padded(rows: int) -> int:
    """Return the number of rows with which a product is computed.

    oneDNN generates code for each number of rows (0.5 ms a shape): a decode step's few numbers stay as they are, a
    prefill's many become few.
    """
    return rows if rows <= _UNPADDED_ROWS else -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE


@functools.cache
def term_bits() -> int:
    """Return the bits of a term: 8, or 7 and a warning in the log where a small product of 8-bit terms isn't exact."""
    reason = refusal(256, 256, terms=2, bits=8)
    if reason is None:
        return 8
    _log.warning("oneDNN's INT8 products have 7-bit terms, with 8 bits %s", reason)
    return 7


@functools.cache
def refusal(outputs: int, inputs: int, terms: int, bits: int) -> str | None:
    """Return why a product with weights of this shape is unusable; None if its sums are the exact integers."""
    if inputs > MAX_INPUTS:
        return f"sums of more than {MAX_INPUTS} inputs leave int32"
    try:
        return _wrong_sums(min(outputs, _MAX_TRIAL_OUTPUTS + outputs % 64), inputs, terms, bits)
    except Exception as error:  # noqa: BLE001 - an operator that a build of PyTorch lacks can raise anything
        return f"the product fails: {one_line(error)}"


def _wrong_sums(outputs: int, inputs: int, terms: int, bits: int) -> str | None:
    """Compare products with exact integers, extreme ones among them; return a difference in words, or None."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randint(-127, 128, (_TRIAL_WEIGHT_ROWS, inputs), dtype=torch.int8, generator=random)
    # The largest sums of both signs, and the pairs that saturate first.
    rows[0], rows[1] = 127, -127
    row_of_output = torch.arange(outputs) % _TRIAL_WEIGHT_ROWS
    scales = torch.rand(outputs, generator=random)
    half = 1 << (bits - 1)
    values = torch.randint(-half, half, (terms * max(_TRIAL_ROWS), inputs), generator=random)
    values[0], values[1] = -half, half - 1
    stack = (values + half).to(torch.uint8)
    product = IntegerProduct(rows[row_of_output], scales, bits)
    # float64 holds every sum exactly.
    sums = (values.double() @ rows.double().T).float()
    for count in _TRIAL_ROWS:
        result, expected = product(stack[: terms * count]), sums[: terms * count, row_of_output] * scales
        if not torch.equal(result, expected):
            error = (result - expected).abs().max() / expected.abs().max()
            return f"sums of {count} rows are wrong by {error:.1%} of the largest"
    return None
