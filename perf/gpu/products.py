"""The cost of a step's matrix products: every way to multiply with an 8-bit weight, by shape and number of rows.

- `fp16` (`fp32` on a CPU): the unquantized weight through the matrix library: the baseline.
- `bitsandbytes`, `bitsandbytes_6`: its layer at thresholds 0 and 6, including the rounding of the activations.
- `dequantize`: the weight widened as a whole at every call, then the matrix library.
- `int_mm`: both factors in INT8 already, nothing scaled: PyTorch's product alone, the best that W8A8 could reach.
- `w8a8`: the same, with the activations rounded row by row before and the scales applied after.
- `fused`, `engine_many`: the engine's own, for few rows and for many.

Each is timed in two ways:

- `eager`: calls back to back, and one wait for the device at the end. For a kernel of a few microseconds that is the
  cost of the call, not of the kernel.
- `graph`: the same calls captured once as a CUDA graph and replayed: the device's own time. None if they can't be
  captured, because something in them waits for the device.

The ceiling is reading the weight once at the measured bandwidth. Weights rotate among enough copies to exceed the
device's cache several times, as a model's layers do. The error is ‖out − exact‖ / ‖exact‖ against the quantized
weight's product with the same activations in float64: what a way adds to the rounding of the weights.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from llama_engine.cuda_graphs import cuda_capture
from llama_engine.kernels.gpu import gpu_reference
from torch.nn.functional import linear, pad

from perf.checkpoint import Shape
from perf.course import reason
from perf.gpu.models import in_8_bits
from perf.overhead.stopwatch import settle
from perf.roofline.rates import DeviceRates

INT_MM = "int_mm"
FUSED = "fused"
OUTLIERS = "bitsandbytes_6"
INT_MM_ROWS = 32
"""PyTorch's INT8 product takes more than 16 rows on CUDA; fewer are padded to this many."""
CACHES = 256 << 20
"""Bytes of weights to rotate among: five times an H100's cache of 50 MB."""
OUTLIER_COLUMNS = 6
"""Activation columns with values beyond threshold 6, as in a model of this size (arXiv:2208.07339)."""
CALLS = 64
"""Calls per repetition: waiting for the device at its end costs some microseconds."""

Product = Callable[[torch.Tensor], torch.Tensor]


def matrices(shape: Shape) -> list[tuple[int, int]]:
    """Return the outputs and inputs of the distinct linear layers of a Llama's decoder; y = x Wᵀ."""
    keys = shape.key_value_heads * (shape.hidden // shape.heads)
    attention = [(shape.hidden, shape.hidden), (keys, shape.hidden)]
    return [*dict.fromkeys([*attention, (shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)])]


class Weight:
    """One copy of a matrix: bitsandbytes' layers over it, its 8-bit codes [outputs, inputs] and their scales [outputs].

    scales: float32, the value of code 1.
    """

    def __init__(self, outputs: int, inputs: int, device: torch.device, number: int) -> None:
        self.dtype = torch.float32 if device.type == "cpu" else torch.float16
        generator = torch.Generator(device).manual_seed(number)
        plain = torch.randn(outputs, inputs, generator=generator, device=device, dtype=self.dtype) / inputs**0.5
        self.layer = in_8_bits(plain)
        self.outliers = in_8_bits(plain, threshold=6.0)
        self.codes = self.layer.weight.data
        scales = getattr(self.layer.weight, "SCB", None)
        assert isinstance(scales, torch.Tensor)
        self.scales = scales.float() / 127.0
        # The codes' values, so that all products have one exact result.
        self.plain = self.widened()

    def widened(self) -> torch.Tensor:
        """Return the dequantized [outputs, inputs]."""
        return self.codes.to(self.dtype) * self.scales[:, None].to(self.dtype)

    def w8a8(self, rows: torch.Tensor) -> torch.Tensor:
        """Round the activations row by row, multiply in INT8 and apply the scales."""
        scales = rows.abs().amax(-1, keepdim=True).float().clamp_min(1e-8) / 127.0
        codes = (rows / scales).round().clamp(-127, 127).to(torch.int8)
        return (_int_mm(codes, self.codes) * scales * self.scales).to(rows.dtype)

    def fused(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply by the engine's kernel. Raises RuntimeError without CUDA, or what importing the kernel raises."""
        if not rows.is_cuda:
            raise RuntimeError("needs CUDA")
        # Imported here: it needs the Triton language and a GPU.
        from llama_engine.kernels.gpu.int8_product import int8_product

        return int8_product(rows, self.codes, self.scales, None)


def ways(weight: Weight, with_fused: bool = True) -> Mapping[str, Product]:
    """Return every way to multiply with a weight, by name."""
    return {
        "fp32" if weight.dtype == torch.float32 else "fp16": lambda rows: linear(rows, weight.plain),
        "bitsandbytes": weight.layer,
        OUTLIERS: weight.outliers,
        "dequantize": lambda rows: linear(rows, weight.widened()),
        # Takes codes instead of activations.
        INT_MM: lambda codes: _int_mm(codes, weight.codes),
        "w8a8": weight.w8a8,
        **({FUSED: weight.fused} if with_fused else {}),
        "engine_many": lambda rows: gpu_reference.int8_product(rows, weight.codes, weight.scales, None),
    }


def measure(
    outputs: int,
    inputs: int,
    rows: int,
    device: torch.device,
    rates: DeviceRates,
    seconds: float,
    fused: bool = True,
) -> dict[str, object]:
    """Time every product of a matrix with `rows` rows, `seconds` each; one that fails has its reason."""
    size = outputs * inputs
    copies = 1 if device.type == "cpu" else max(2, -(-CACHES // size))
    weights = [Weight(outputs, inputs, device, number) for number in range(copies)]
    generator = torch.Generator(device).manual_seed(rows)
    activations = torch.randn(rows, inputs, generator=generator, device=device, dtype=weights[0].dtype)
    activations[:, :: inputs // OUTLIER_COLUMNS] += 8.0
    exact = activations.double() @ (weights[0].codes.double() * weights[0].scales.double()[:, None]).T
    each = [ways(weight, fused) for weight in weights]
    found = {name: _measured([one[name] for one in each], name, activations, exact, seconds) for name in each[0]}
    bounds = {kind: 1e6 * size * width / rates.read(CACHES * width) for kind, width in (("int8", 1), ("fp16", 2))}
    # The device's own time where it is known.
    taken = {
        name: way["eager_us"] if way["graph_us"] is None else way["graph_us"]
        for name, way in found.items()
        if "failed" not in way
    }
    fastest = sorted(taken, key=lambda name: (taken[name], name))
    return {
        "outputs": outputs,
        "inputs": inputs,
        "rows": rows,
        "bandwidth_us": {kind: round(bound, 2) for kind, bound in bounds.items()},
        "ways": found,
        "in_short": ", ".join(f"{name} {taken[name]:,.1f}" for name in fastest)
        + f" µs; reading INT8 {bounds['int8']:,.1f} µs",
    }


def _measured(
    products: Sequence[Product], name: str, activations: torch.Tensor, exact: torch.Tensor, seconds: float
) -> dict[str, Any]:
    """Time one way to multiply, each product with a weight of its own."""
    device = activations.device
    try:
        with torch.inference_mode():
            # Made before timing: its kernels would count beside a product of some microseconds. The values don't matter
            # for the time, and rounding belongs to `w8a8`.
            codes = _padded(torch.full(activations.shape, 3, dtype=torch.int8, device=device))
            factor = codes if name == INT_MM else activations
            # In whole rounds; on a CPU one is enough.
            rounds = 1 if device.type == "cpu" else max(1, -(-CALLS // len(products)))
            waits = "at a threshold bitsandbytes waits for the device in every layer" if name == OUTLIERS else None
            timing = timed([partial(product, factor) for product in products] * rounds, device, seconds, waits)
            error = None if name == INT_MM else float((products[0](factor).double() - exact).norm() / exact.norm())
    except Exception as failure:  # noqa: BLE001 - a way that this device or library lacks is a result
        return {"failed": reason(failure)}
    return {**timing, "error": None if error is None else float(f"{error:.3g}")}


def timed(
    actions: Sequence[Callable[[], object]], device: torch.device, seconds: float, waits: str | None
) -> dict[str, Any]:
    """Time the actions for about `seconds` in all; return the microseconds of one, eager and in a graph.

    waits: why they can't be captured, if known: a failed capture leaves PyTorch's allocator in an unknown state.
    """
    uncaptured = waits if device.type == "cuda" else "needs CUDA"
    share = seconds if uncaptured else seconds / 2

    def each() -> None:
        for action in actions:
            action()

    def median_us(run: Callable[[], object]) -> float:
        taken: list[float] = []
        until = time.perf_counter() + share
        while not taken or time.perf_counter() < until:
            settle(device)
            began = time.perf_counter()
            run()
            settle(device)
            taken.append(time.perf_counter() - began)
        return round(1e6 * statistics.median(taken) / len(actions), 2)

    each()
    settle(device)
    eager = median_us(each)
    if uncaptured is None:
        try:
            replay = cuda_capture(device)(each)
            replay()
            settle(device)
        except Exception as error:  # noqa: BLE001 - whatever can't be captured, the reason is the result
            uncaptured = reason(error)
        else:
            return {"eager_us": eager, "graph_us": median_us(replay)}
    return {"eager_us": eager, "graph_us": None, "uncaptured": uncaptured}


def _padded(rows: torch.Tensor) -> torch.Tensor:
    missing = INT_MM_ROWS - rows.shape[0]
    return pad(rows, (0, 0, 0, missing)) if missing > 0 and rows.is_cuda else rows


def _int_mm(rows: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Multiply [rows, inputs] with [outputs, inputs], both int8, into int32 [rows, outputs]."""
    return torch._int_mm(_padded(rows), codes.t())[: rows.shape[0]]
