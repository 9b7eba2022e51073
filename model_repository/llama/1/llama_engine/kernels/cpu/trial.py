"""Selects and verifies the CPU kernels when a model loads.

Candidates are the instruction sets that the CPU has, the environment allows and an object exists for, fastest first.
Linear layers must give the same bits as `cpu_reference`, and attention the same values within a tolerance. If a
candidate fails, one log line says why, and the next one is tried.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from llama_engine.errors import one_line
from llama_engine.kernels.cpu import cpu_reference
from llama_engine.kernels.cpu.build import BUILD_DIRECTORY, SCRIPT, object_path
from llama_engine.kernels.cpu.forward import CpuForward, CpuLlama
from llama_engine.kernels.cpu.instruction_sets import allowed_instruction_sets, request_amx
from llama_engine.kernels.cpu.library import CpuKernels
from llama_engine.kernels.cpu.packing import Dimensions, QuantizedRows, pack_layer, pack_linear, padded
from llama_engine.model.activation_terms import ONE_TERM, TWO_TERMS, ActivationTerms
from llama_engine.model.kv_cache import CPU_PAGE_SIZE, KVCacheShape
from llama_engine.model.weights import LayerWeights, LinearWeight

ATTENTION_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.int8: 5e-2}
"""Tolerated error of the attention by cache dtype, relative to the reference's largest value. A float32 halfway between
two bfloat16 or int8 values can be rounded to either."""

_TRIAL_RATIO = 6.0
"""Outlier ratio of a product in which some rows have two terms."""

_log = logging.getLogger(__name__)


def choose_cpu_kernels(
    dimensions: Dimensions, cache_dtype: torch.dtype, directory: Path = BUILD_DIRECTORY
) -> CpuKernels | None:
    """Return verified kernels for a model, or None; log a warning for each faster set that fails or isn't built."""
    candidates = allowed_instruction_sets()
    if not candidates:
        _log.warning("the CPU kernels can't be used: they need AVX2 and FMA, and ATEN_CPU_CAPABILITY or "
                     "ONEDNN_MAX_CPU_ISA must allow them")  # fmt: skip
        return None
    existing = [name for name in candidates if object_path(name, directory).exists()]
    # Log one line if no object is built; else one for each faster instruction set without an object.
    for name in candidates[: candidates.index(existing[0]) if existing else 1]:
        _log.warning("the CPU kernels aren't built for %s: run python3 %s", name, SCRIPT)
    for name in existing:
        try:
            if name == "avx512-amx":
                request_amx()
            kernels = CpuKernels(name, object_path(name, directory))
            verify(kernels, dimensions, cache_dtype)
        except (OSError, AttributeError, RuntimeError, ValueError) as error:
            _log.warning("the CPU kernels for %s can't be used: %s", name, one_line(error))
        else:
            return kernels
    return None


def verify(kernels: CpuKernels, dimensions: Dimensions, cache_dtype: torch.dtype) -> None:
    """Raise RuntimeError if a linear layer's bits or the attention's values are wrong."""
    generator = torch.Generator().manual_seed(0)
    for outputs, inputs in sorted(set(dimensions.linear_shapes.values())):
        # All blocks of outputs are computed alike, so a few blocks and the padded last one are verified.
        for terms in (ONE_TERM, TWO_TERMS, ActivationTerms(_TRIAL_RATIO)):
            _verify_linear(kernels, 256 + outputs % 64, inputs, terms, generator)
    _verify_attention(kernels, dimensions, cache_dtype, generator)


def _verify_linear(
    kernels: CpuKernels, outputs: int, inputs: int, terms: ActivationTerms, generator: torch.Generator
) -> None:
    """Raise RuntimeError unless a linear layer has the reference's bits for random and extreme values.

    35 rows are more than any instruction set multiplies at once, and not a multiple of that. Every third but the first
    has an outlier.
    """
    weight = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    weight[0], weight[1] = 127, -127
    x = torch.randn(35, inputs, generator=generator)
    x[0], x[1], x[2] = 1, -1, 126.5 / 127  # q = 127 · 254; its negative; both terms near their bounds
    x[2, 0] = 1
    x[3::3, inputs // 2] *= 100
    layer = LinearWeight(weight, torch.rand(outputs, generator=generator) + 0.5)
    if not torch.equal(run_linear(kernels, x, layer, terms), cpu_reference.linear(x, layer, terms)):
        raise RuntimeError(f"the product of {inputs} inputs with {terms.describe()} isn't exact")


def run_linear(kernels: CpuKernels, x: torch.Tensor, layer: LinearWeight, terms: ActivationTerms) -> torch.Tensor:
    """Return the kernels' result of one linear layer for x [rows, inputs]."""
    packed = pack_linear(kernels, layer)
    rows, inputs = x.shape
    wide = torch.nn.functional.pad(x, (0, padded(inputs) - inputs)).contiguous()
    y = torch.full((rows, len(packed.weight)), torch.nan)
    room = QuantizedRows(rows, wide.shape[1], terms.limit(inputs))
    kernels.linear(packed.matrix, room.structure, wide, y)
    return y[:, : len(layer.weight)]


def _verify_attention(
    kernels: CpuKernels, dimensions: Dimensions, cache_dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Verify the attention of two sequences of 37 tokens on scattered pages, computed in three chunks."""
    tokens, dim, page_table = 37, dimensions.head_dim, [[5, 2, 6], [1, 4, 3]]
    shape = KVCacheShape(
        layers=1,
        slots=len(page_table),
        key_value_heads=dimensions.kv_heads,
        max_model_len=tokens,
        head_dim=dimensions.padded_head_dim,
        dtype=cache_dtype,
        page_size=CPU_PAGE_SIZE,
        pages=6,
    )
    forward = CpuForward(attention_model(kernels, dimensions, tokens), shape, 2 * tokens)
    for slot, pages in enumerate(page_table):
        forward.set_pages(slot, 0, pages)
    qkv = torch.randn(2, tokens, dimensions.heads + 2 * dimensions.kv_heads, dim, generator=generator)
    slots = torch.arange(2).repeat_interleave(tokens).view(2, tokens)
    positions = torch.arange(tokens).repeat(2, 1)
    results = []
    for cut in (slice(0, 20), slice(20, 21), slice(21, tokens)):
        x = qkv[:, cut]
        attended = forward.attention(x.flatten(0, 1), slots[:, cut].flatten(), positions[:, cut].flatten())
        results.append(attended.view(2, x.shape[1], dimensions.heads, dim))
    result = torch.cat(results, dim=1)
    cosine, sine = forward.llama.cosine, forward.llama.sine
    expected = torch.stack([cpu_reference.attention(x, dimensions, cosine, sine, cache_dtype) for x in qkv])
    error = (result - expected).abs().max().item() / expected.abs().max().item()
    if not error <= ATTENTION_TOLERANCE[cache_dtype]:  # a NaN fails too
        raise RuntimeError(f"the attention is wrong by {error:.1%} of the largest value")


def attention_model(kernels: CpuKernels, dimensions: Dimensions, positions: int) -> CpuLlama:
    """Return a one-layer model with these heads and tiny linear layers of zeros, to verify its attention."""
    small = Dimensions(64, dimensions.heads, dimensions.kv_heads, dimensions.head_dim, 64, 64, 1e-5, dimensions.scaling)

    def zeros(outputs: int, inputs: int) -> LinearWeight:
        return LinearWeight(torch.zeros(outputs, inputs, dtype=torch.int8), torch.ones(outputs))

    width = small.heads * small.head_dim
    qkv = zeros(width + 2 * small.kv_heads * small.head_dim, 64)
    layer = LayerWeights(torch.ones(64), qkv, zeros(64, width), torch.ones(64), zeros(128, 64), zeros(64, 64))
    angles = torch.arange(positions)[:, None] * torch.logspace(0, -3, small.head_dim // 2)
    layers = [pack_layer(kernels, small, layer)]
    return CpuLlama(
        kernels, small, layers, torch.ones(64), pack_linear(kernels, zeros(64, 64)), angles.cos(), angles.sin()
    )
