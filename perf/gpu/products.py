"""The cost of a step's matrix products: every way to multiply with an 8-bit weight, by shape and number of rows.

- `fp16` (`fp32` on a CPU): the unquantized weight through the matrix library: the baseline.
- `bitsandbytes`, `bitsandbytes_6`: its layer at thresholds 0 and 6, including the rounding of the activations.
- `dequantize`: the weight widened as a whole at every call, then the matrix library.
- `int_mm`: both factors in INT8 already, nothing scaled: PyTorch's product alone, the best that W8A8 could reach.
- `w8a8`: the same, with the activations rounded row by row before and the scales applied after.
- `fused`, `engine_many`: the engine's own, for few rows and for many.

The ceiling is reading the weight once at the measured bandwidth. Weights rotate among enough copies to exceed the
device's cache several times, as a model's layers do. The error is ‖out − exact‖ / ‖exact‖ against the quantized
weight's product with the same activations in float64: what a way adds to the rounding of the weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from llama_engine.kernels import reference
from llama_engine.libraries import Linear8bitLt

from perf.checkpoint import Shape
from perf.course import reason
from perf.gpu.models import in_8_bits
from perf.gpu.timing import WAITS, timed
from perf.roofline.rates import DeviceRates

INT_MM = "int_mm"
FUSED = "fused"
INT_MM_ROWS = 32
"""PyTorch's INT8 product takes more than 16 rows on CUDA; fewer are padded to this many."""
CACHES = 256 << 20
"""Bytes of weights to rotate among: five times an H100's cache of 50 MB."""
OUTLIER_COLUMNS = 6
"""Activation columns with values beyond threshold 6, as in a model of this size (arXiv:2208.07339)."""
CALLS = 64
"""Calls per repetition: waiting for the device at its end costs some microseconds."""

OUTLIERS = "bitsandbytes_6"

Product = Callable[[torch.Tensor], torch.Tensor]

_OUTPUTS, _INNER, _STAGES, _SPLITS = (32, 64, 128), (64, 128, 256), (3, 5), (1, 2, 4)
_SHARED_MEMORY = 200 << 10


class NoKernelError(Exception):
    """This device has no fused product; `str()` gives the reason."""


def fused_product(codes: torch.Tensor, scales: torch.Tensor) -> Product:
    """Return y = x (codes · scales)ᵀ by the engine's kernel. Raises NoKernelError, or what importing it raises.

    codes: [outputs, inputs], int8. scales: [outputs], float32, the value of code 1.
    """
    _refuse_without_cuda(codes)
    # Imported here: it needs the Triton language and a GPU.
    from llama_engine.kernels.int8_product import int8_product

    return lambda rows: int8_product(rows, codes, scales, None)


def variants(codes: torch.Tensor, scales: torch.Tensor) -> Mapping[str, Product]:
    """Return the fused product with the weight cut in many ways, by description. Raises as `fused_product` does."""
    _refuse_without_cuda(codes)
    from llama_engine.kernels.int8_product import Tiles, int8_product

    def cut(outputs: int, inner: int, stages: int, splits: int) -> Product:
        way = Tiles(outputs=outputs, inner=inner, stages=stages, splits=splits)
        return lambda rows: int8_product(rows, codes, scales, None, way)

    return {
        f"outputs {outputs}, inner {inner}, stages {stages}, splits {splits}": cut(outputs, inner, stages, splits)
        for outputs, inner, stages, splits in itertools.product(_OUTPUTS, _INNER, _STAGES, _SPLITS)
        # Per stage a block of the weight and one of 32 rows in 16 bits; a cut that doesn't fit isn't worth compiling.
        if stages * inner * (outputs + 2 * 32) <= _SHARED_MEMORY
    }


def _refuse_without_cuda(codes: torch.Tensor) -> None:
    if codes.device.type != "cuda":
        raise NoKernelError("needs CUDA")


@dataclass(frozen=True)
class Matrix:
    """A linear layer's shape, y = x Wᵀ with W of [outputs, inputs]."""

    name: str
    outputs: int
    inputs: int

    @classmethod
    def of(cls, shape: Shape) -> Sequence[Matrix]:
        """Return the distinct ones of a Llama's decoder."""
        head = shape.hidden // shape.heads
        matrices = [
            cls("queries and output", shape.heads * head, shape.hidden),
            cls("gate and up", shape.intermediate, shape.hidden),
            cls("down", shape.hidden, shape.intermediate),
        ]
        if shape.key_value_heads != shape.heads:
            matrices.insert(1, cls("keys and values", shape.key_value_heads * head, shape.hidden))
        return matrices


class Weight:
    """One copy of a matrix: its 8-bit codes with their scales, and the products that can be made with it."""

    def __init__(self, matrix: Matrix, device: torch.device, number: int) -> None:
        dtype = torch.float32 if device.type == "cpu" else torch.float16
        generator = torch.Generator(device).manual_seed(number)
        size = (matrix.outputs, matrix.inputs)
        plain = torch.randn(size, generator=generator, device=device, dtype=dtype) / matrix.inputs**0.5
        self.layer: Linear8bitLt = in_8_bits(plain)
        self.outliers: Linear8bitLt = in_8_bits(plain, threshold=6.0)
        self.codes = self.layer.weight.data
        scales = getattr(self.layer.weight, "SCB", None)
        assert isinstance(scales, torch.Tensor)
        self.scales = scales.float() / 127.0
        self._dtype = dtype
        # The codes' values, so that all products have one exact result.
        self.plain = self.widened()

    def widened(self) -> torch.Tensor:
        """Return the dequantized [outputs, inputs]."""
        return self.codes.to(self._dtype) * self.scales[:, None].to(self._dtype)

    def products(self) -> Mapping[str, Product]:
        """Return every way to multiply with it, by name."""
        plain = "fp32" if self._dtype == torch.float32 else "fp16"
        return {
            plain: lambda rows: torch.nn.functional.linear(rows, self.plain),
            "bitsandbytes": self.layer,
            OUTLIERS: self.outliers,
            "dequantize": lambda rows: torch.nn.functional.linear(rows, self.widened()),
            # Takes codes made by `_codes_of`.
            INT_MM: lambda codes: _int_mm(codes, self.codes),
            "w8a8": self._w8a8,
            # Raises the reason where it can't run.
            FUSED: lambda rows: self._fused(rows),
            "engine_many": lambda rows: reference.int8_product(rows, self.codes, self.scales, None),
        }

    @cached_property
    def _fused(self) -> Product:
        return fused_product(self.codes, self.scales)

    def _w8a8(self, rows: torch.Tensor) -> torch.Tensor:
        scales = rows.abs().amax(-1, keepdim=True).float().clamp_min(1e-8) / 127.0
        codes = (rows / scales).round().clamp(-127, 127).to(torch.int8)
        return (_int_mm(codes, self.codes) * scales * self.scales).to(rows.dtype)


def measure(
    matrix: Matrix, rows: int, device: torch.device, rates: DeviceRates, seconds: float, with_fused: bool = True
) -> dict[str, object]:
    """Time every product of a matrix with `rows` rows, `seconds` each; one that fails has its reason."""

    def chosen(weight: Weight) -> Mapping[str, Product]:
        return {name: product for name, product in weight.products().items() if with_fused or name != FUSED}

    return _measure(matrix, rows, device, rates, seconds, chosen)


def tiles(matrix: Matrix, rows: int, device: torch.device, rates: DeviceRates, seconds: float) -> dict[str, object]:
    """Time the fused product with the weight cut in many ways. Raises NoKernelError where there is none."""
    return _measure(matrix, rows, device, rates, seconds, lambda weight: variants(weight.codes, weight.scales))


def _measure(
    matrix: Matrix,
    rows: int,
    device: torch.device,
    rates: DeviceRates,
    seconds: float,
    products: Callable[[Weight], Mapping[str, Product]],
) -> dict[str, object]:
    size = matrix.outputs * matrix.inputs
    copies = 1 if device.type == "cpu" else max(2, -(-CACHES // size))
    weights = [Weight(matrix, device, number) for number in range(copies)]
    generator = torch.Generator(device).manual_seed(rows)
    activations = torch.randn(rows, matrix.inputs, generator=generator, device=device, dtype=weights[0].plain.dtype)
    activations[:, :: matrix.inputs // OUTLIER_COLUMNS] += 8.0
    exact = activations.double() @ (weights[0].codes.double() * weights[0].scales.double()[:, None]).T
    each = [products(weight) for weight in weights]
    ways = {name: _timed([one[name] for one in each], name, activations, exact, device, seconds) for name in each[0]}
    bounds = {kind: 1e6 * size * width / rates.read(CACHES * width) for kind, width in (("int8", 1), ("fp16", 2))}
    ran = {name: way for name, way in ways.items() if "failed" not in way and name != INT_MM}
    return {
        "matrix": matrix.name,
        "outputs": matrix.outputs,
        "inputs": matrix.inputs,
        "rows": rows,
        "copies": copies,
        "bandwidth_us": {kind: round(bound, 2) for kind, bound in bounds.items()},
        "ways": ways,
        "fastest": min(ran, key=lambda name: _best_us(ran[name]), default=None),
        "in_short": _in_short(ways, bounds["int8"]),
    }


def _timed(
    products: Sequence[Product],
    name: str,
    activations: torch.Tensor,
    exact: torch.Tensor,
    device: torch.device,
    seconds: float,
) -> dict[str, object]:
    try:
        with torch.inference_mode():
            # Made before timing: its kernels would count beside a product of some microseconds.
            factor = _codes_of(activations) if name == INT_MM else activations
            actions = [lambda product=product: product(factor) for product in products]
            # In whole rounds; on a CPU one is enough.
            rounds = 1 if device.type == "cpu" else max(1, -(-CALLS // len(actions)))
            timing = timed(actions * rounds, device, seconds, WAITS if name == OUTLIERS else None)
            error = None if name == INT_MM else float((products[0](factor).double() - exact).norm() / exact.norm())
    except Exception as failure:  # noqa: BLE001 - a way that this device or library lacks is a result
        return {"failed": reason(failure)}
    return {**timing.to_json(), "error": None if error is None else float(f"{error:.3g}")}


def _in_short(ways: Mapping[str, Mapping[str, object]], bound: float) -> str:
    ran = sorted((_best_us(way), name) for name, way in ways.items() if "failed" not in way)
    # The fastest: there are many tiles.
    return ", ".join(f"{name} {taken:,.1f}" for taken, name in ran[:8]) + f" µs; reading INT8 {bound:,.1f} µs"


def _best_us(way: Mapping[str, object]) -> float:
    found = way["graph_us"] if way["graph_us"] is not None else way["eager_us"]
    assert isinstance(found, float)
    return found


def _codes_of(rows: torch.Tensor) -> torch.Tensor:
    """Return int8 of as many rows, padded; the values don't matter for the time, and rounding belongs to `w8a8`."""
    return _padded(torch.full(rows.shape, 3, dtype=torch.int8, device=rows.device))


def _padded(rows: torch.Tensor) -> torch.Tensor:
    missing = INT_MM_ROWS - rows.shape[0]
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing > 0 and rows.is_cuda else rows


def _int_mm(rows: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Multiply [rows, inputs] with [outputs, inputs], both int8, into int32 [rows, outputs]."""
    return torch._int_mm(_padded(rows), codes.t())[: rows.shape[0]]
