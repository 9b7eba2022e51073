"""Measures how fast this device reads memory and multiplies matrices.

Reading: the faster of summing a tensor and copying it, over tensors of several sizes: a small model in INT8 fits into a
server processor's last cache. On a GPU the sizes begin where its caches end. Multiplying: large square products; a
decode step's flat ones reach less. In INT8 on a CPU the faster of PyTorch's `_int_mm` and the compiled kernels' linear
layer counts, with the operations of both its terms. The fastest of many blocks of repetitions counts, because the
roofline is what the undisturbed device can do. All takes ten seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.kernels.activation_terms import TWO_TERMS
from llama_engine.kernels.cpu.instruction_sets import choose_cpu_kernels
from llama_engine.kernels.cpu.packing import QuantizedTokens, pack_linear
from torch.utils.benchmark import Timer

from perf.checkpoint import DTYPES
from perf.roofline import WIDTHS, DeviceRates, Weights

CPU_SIZES = tuple(size << 20 for size in (4, 8, 16, 32, 64, 128, 256))
GPU_SIZES = tuple(size << 20 for size in (256, 1024, 4096))
SECONDS = 0.4
"""Minimum seconds of measurement for each size and product."""

_EDGES = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)}
_DTYPES: dict[Weights, torch.dtype] = {name: getattr(torch, dtype) for name, dtype in DTYPES.items()}


def measure_rates(threads: int, seconds: float = SECONDS) -> DeviceRates:
    """Measure the GPU, or the CPU with `threads` threads where there is none. seconds: for each single measurement."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = CPU_SIZES
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # At least the smallest: if not even that is free, the allocation fails with its own message.
        sizes = tuple(size for size in GPU_SIZES if size <= free // 4) or GPU_SIZES[:1]
    bandwidth = {size: _read(size, device, threads, seconds) for size in sizes}
    operations = {kind: rate for kind in WIDTHS if (rate := _multiply(kind, device, threads, seconds)) is not None}
    if device.type == "cpu" and (rate := _compiled(threads, seconds)) is not None:
        operations["int8"] = max(rate, operations.get("int8", 0.0))
    return DeviceRates(device.type, threads, bandwidth, operations)


def _read(size: int, device: torch.device, threads: int, seconds: float) -> float:
    """Return bytes per second over a tensor of `size` bytes."""
    values = torch.rand(size // 4, device=device)
    target, source = values.chunk(2)
    return size / min(_best(values.sum, threads, seconds), _best(lambda: target.copy_(source), threads, seconds))


def _multiply(kind: Weights, device: torch.device, threads: int, seconds: float) -> float | None:
    """Return operations per second at the best edge length; None if this format can't be multiplied here."""
    best = 0.0
    for edge in _EDGES[device.type]:
        # Random values: a GPU multiplies equal ones faster, as its clock depends on the bits that change.
        random = (
            torch.randint(-127, 128, (edge, edge), device=device)
            if kind == "int8"
            else torch.randn(edge, edge, device=device)
        )
        square = random.to(_DTYPES[kind])
        # torch has no public INT8 product with INT32 sums; bitsandbytes calls this one too.
        multiply = torch._int_mm if kind == "int8" else torch.matmul
        # On a GPU, INT8 needs the second factor's columns contiguous, as weights are.
        product = partial(multiply, square, square.t())
        try:
            taken = _best(product, threads, seconds)
        except (RuntimeError, NotImplementedError):
            # The format is absent in the result.
            return None
        best = max(best, 2 * edge**3 / taken)
        if 8 * taken > seconds:
            # The next edge takes at least that long, and a format as slow as this is not faster there.
            break
    return best


def _compiled(threads: int, seconds: float) -> float | None:
    """Return 8-bit operations per second of the CPU kernels, each term's own, with quantization; None without them."""
    edge, terms = _EDGES["cpu"][-1], 2
    kernels = choose_cpu_kernels()
    if kernels is None:
        return None
    packed = pack_linear(kernels, LinearWeight(torch.ones(edge, edge, dtype=torch.int8), torch.ones(edge)))
    x, y = torch.ones(edge, edge), torch.empty(edge, edge)
    quantized = QuantizedTokens(edge, edge, edge, TWO_TERMS)
    # Neither an adapter nor room for its ranks.
    tensors = (packed.matrix, quantized.structure, None, None, x.data_ptr())
    product = partial(kernels.linear, *tensors, edge, y.data_ptr(), threads)
    return terms * 2 * edge**3 / _best(product, threads, seconds)


def _best(action: Callable[[], object], threads: int, seconds: float) -> float:
    """Return the least mean time of a call, in seconds, among blocks of calls that take `seconds` together."""
    timer = Timer("action()", globals={"action": action}, num_threads=threads)
    return min(timer.blocked_autorange(min_run_time=seconds).times)
