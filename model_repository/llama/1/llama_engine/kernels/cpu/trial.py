"""Selects and verifies the CPU kernels when a model loads.

Candidates are the instruction sets that the CPU has, the environment allows and an object exists for, fastest first.
Linear layers must give the same bits as `cpu_reference`, and attention the same values within a tolerance. If a
candidate fails, one log line says why, and the next one is tried.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from llama_engine.errors import one_line
from llama_engine.kernels.cpu import cpu_reference
from llama_engine.kernels.cpu.build import BUILD_DIRECTORY, SCRIPT, object_path
from llama_engine.kernels.cpu.forward import CpuForward, CpuLlama
from llama_engine.kernels.cpu.instruction_sets import allowed_instruction_sets, request_amx
from llama_engine.kernels.cpu.library import CpuKernels
from llama_engine.kernels.cpu.packing import (
    QuantizedRows,
    linear_shapes,
    pack_layer,
    pack_linear,
    padded,
    padded_head_dim,
)
from llama_engine.model.activation_terms import ONE_TERM, TWO_TERMS, ActivationTerms
from llama_engine.model.architecture import ROPE, Architecture
from llama_engine.model.kv_cache import CPU_PAGE_SIZE, KVCacheShape
from llama_engine.model.weights import LayerWeights, LinearWeight

ATTENTION_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.int8: 5e-2}
"""Tolerated error of the attention by cache dtype, relative to the reference's largest value. A float32 halfway between
two bfloat16 or int8 values can be rounded to either."""

_TRIAL_RATIO = 6.0
"""Outlier ratio of a product in which some rows have two terms."""

_TRIAL_WINDOW = 19
"""Window of attention, which begins within a page."""
GROUPS = ((4, 32, True), (4, 128, False), (8, 32, False), (8, 512, True))
"""Bits and sizes of the column groups that are verified, and whether they have offsets and an order. Groups of other
sizes are computed alike."""

_GROUPED_SHAPE = (96, 1024)
"""Outputs and inputs of their products."""

_log = logging.getLogger(__name__)


def choose_cpu_kernels(
    architecture: Architecture, cache_dtype: torch.dtype, directory: Path = BUILD_DIRECTORY
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
            verify(kernels, architecture, cache_dtype)
        except (OSError, AttributeError, RuntimeError, ValueError) as error:
            _log.warning("the CPU kernels for %s can't be used: %s", name, one_line(error))
        else:
            return kernels
    return None


def verify(kernels: CpuKernels, architecture: Architecture, cache_dtype: torch.dtype) -> None:
    """Raise RuntimeError if a linear layer's bits or the attention's values are wrong."""
    generator = torch.Generator().manual_seed(0)
    for outputs, inputs in sorted(set(linear_shapes(architecture).values())):
        # All blocks of outputs are computed alike, so a few blocks and the padded last one are verified.
        layer = _random_layer((256 + outputs % 64, inputs), generator)
        _verify_linear(kernels, layer, f"{inputs} inputs", generator)
    for bits, size, general in GROUPS:
        layer = _random_layer(_GROUPED_SHAPE, generator, bits, size, general)
        _verify_linear(kernels, layer, f"groups of {size} columns in {bits} bits", generator)
    _verify_attention(kernels, architecture, cache_dtype, generator)


def _random_layer(
    shape: tuple[int, int], generator: torch.Generator, bits: int = 8, size: int | None = None, general: bool = False
) -> LinearWeight:
    """Return a layer (outputs, inputs) with the largest and the smallest weights in its first two rows.

    size: of its column groups; None: rows. general: groups have offsets and an order.
    """
    outputs, inputs = shape
    largest = 2 ** (bits - 1) - 1
    weight = torch.randint(-largest, largest + 1, shape, generator=generator, dtype=torch.int8)
    weight[0], weight[1] = largest, -largest if size is None else -largest - 1
    scales = torch.rand((outputs,) if size is None else (outputs, inputs // size), generator=generator) + 0.5
    if not general:
        return LinearWeight(weight, scales, bits=bits)
    offsets = torch.randn(scales.shape, generator=generator)
    return LinearWeight(weight, scales, None, offsets, bits, torch.randperm(inputs, generator=generator))


def _verify_linear(kernels: CpuKernels, layer: LinearWeight, name: str, generator: torch.Generator) -> None:
    """Raise RuntimeError, with a layer's name, unless its products have the reference's bits for any number of terms.

    35 rows are more than any instruction set multiplies at once, and not a multiple of that. Every third but the first
    has an outlier.
    """
    inputs = layer.weight.shape[1]
    x = torch.randn(35, inputs, generator=generator)
    x[0], x[1], x[2] = 1, -1, 126.5 / 127  # q = 127 · 254; its negative; both terms near their bounds
    x[2, 0] = 1
    x[3::3, inputs // 2] *= 100
    for terms in (ONE_TERM, TWO_TERMS, ActivationTerms(_TRIAL_RATIO)):
        if not torch.equal(run_linear(kernels, x, layer, terms), cpu_reference.linear(x, layer, terms)):
            raise RuntimeError(f"the product of {name} with {terms.describe()} isn't exact")


def run_linear(kernels: CpuKernels, x: torch.Tensor, layer: LinearWeight, terms: ActivationTerms) -> torch.Tensor:
    """Return the kernels' result of one linear layer for x [rows, inputs]."""
    packed = pack_linear(kernels, layer)
    rows, inputs = x.shape
    wide = torch.nn.functional.pad(x, (0, padded(inputs) - inputs)).contiguous()
    y = torch.full((rows, packed.matrix.outputs), torch.nan)
    room = QuantizedRows(rows, wide.shape[1], terms.limit(inputs))
    kernels.linear(packed.matrix, room.structure, wide, y)
    return y[:, : len(layer.weight)]


def _verify_attention(
    kernels: CpuKernels, architecture: Architecture, cache_dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Verify each kind of layer's attention of two sequences of 37 tokens on scattered pages, in three chunks."""
    tokens, dim, page_table = 37, architecture.head_dim, [[5, 2, 6], [1, 4, 3]]
    kinds = sorted(
        {
            (bool(window), kind is not None)
            for window, kind in zip(architecture.windows, architecture.ropes, strict=True)
        }
    )
    small = replace(
        architecture,
        layers=len(kinds),
        hidden=64,
        intermediate=64,
        vocabulary=64,
        windows=tuple(_TRIAL_WINDOW if has_window else None for has_window, _ in kinds),
        ropes=tuple(ROPE if has_rope else None for _, has_rope in kinds),
    )
    shape = KVCacheShape(
        layers=small.layers,
        slots=len(page_table),
        key_value_heads=small.kv_heads,
        max_model_len=tokens,
        head_dim=padded_head_dim(small),
        dtype=cache_dtype,
        page_size=CPU_PAGE_SIZE,
        pages=6,
    )
    layer = _attention_layer(small, generator)
    angles = torch.arange(tokens)[:, None] * torch.logspace(0, -3, small.rotary // 2)
    tables = {ROPE: (angles.cos(), angles.sin())}
    packed, head = pack_layer(kernels, small, layer), pack_linear(kernels, _zeros(64, 64))
    llama = CpuLlama(kernels, small, [packed] * small.layers, torch.ones(64), head, tables)
    forward = CpuForward(llama, shape, 2 * tokens)
    for slot, pages in enumerate(page_table):
        forward.set_pages(slot, 0, pages)
    slots = torch.arange(2).repeat_interleave(tokens).view(2, tokens)
    positions = torch.arange(tokens).repeat(2, 1)
    for index in range(small.layers):
        qkv = torch.randn(2, tokens, small.heads + 2 * small.kv_heads, dim, generator=generator)
        results = []
        for cut in (slice(0, 20), slice(20, 21), slice(21, tokens)):
            x = qkv[:, cut]
            attended = forward.attention(x.flatten(0, 1), slots[:, cut].flatten(), positions[:, cut].flatten(), index)
            results.append(attended.view(2, x.shape[1], small.heads, dim))
        result = torch.cat(results, dim=1)
        expected = torch.stack([cpu_reference.attention(x, small, index, layer, tables, cache_dtype) for x in qkv])
        error = (result - expected).abs().max().item() / expected.abs().max().item()
        if not error <= ATTENTION_TOLERANCE[cache_dtype]:  # a NaN fails too
            raise RuntimeError(f"the attention is wrong by {error:.1%} of the largest value")


def _attention_layer(architecture: Architecture, generator: torch.Generator) -> LayerWeights:
    """Return a layer with linear layers of zeros and random norms of query and key, to verify its attention."""
    heads, kv_heads, dim = architecture.heads, architecture.kv_heads, architecture.head_dim
    query_norm, key_norm = None, None
    if architecture.query_key_norm != "none":
        together = architecture.query_key_norm == "projection"
        query_norm, key_norm = (
            torch.rand(count * dim if together else dim, generator=generator) + 0.5 for count in (heads, kv_heads)
        )
    return LayerWeights(
        attention_norm=None,
        query_key_value=_zeros((heads + 2 * kv_heads) * dim, 64),
        attention_output=_zeros(64, heads * dim),
        mlp_norm=None,
        gate_up=_zeros(128, 64),
        down=_zeros(64, 64),
        query_norm=query_norm,
        key_norm=key_norm,
    )


def _zeros(outputs: int, inputs: int) -> LinearWeight:
    return LinearWeight(torch.zeros(outputs, inputs, dtype=torch.int8), torch.ones(outputs))
