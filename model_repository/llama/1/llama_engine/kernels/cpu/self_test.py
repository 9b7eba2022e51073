"""Compares compiled CPU kernels with PyTorch on this CPU: one product bit for bit, an adapter's, and one attention.

It runs when an object is compiled (`build`) and once when a model is loaded (`instruction_sets`).
"""

from __future__ import annotations

import torch

from llama_engine.checkpoint.architecture import ROPE, Architecture
from llama_engine.checkpoint.lora import LoraWeights
from llama_engine.checkpoint.weights import Embedding, LayerWeights, LinearWeight
from llama_engine.kernels.activation_terms import TWO_TERMS, ActivationTerms
from llama_engine.kernels.cache_shape import CPU_PAGE_SIZE, KVCacheShape
from llama_engine.kernels.cpu import cpu_reference
from llama_engine.kernels.cpu.bindings import CpuKernels
from llama_engine.kernels.cpu.forward import CpuForward, PackedLlama
from llama_engine.kernels.cpu.lora import RANKS, PackedLora
from llama_engine.kernels.cpu.packing import QuantizedTokens, pack_layer, pack_linear, pad_channels, padded
from llama_engine.kernels.cpu.paged_cache import CACHE_TYPES
from llama_engine.kernels.lora_layout import LoraPart

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.int8: 5e-2}
"""Tolerated error of the attention by cache dtype, relative to the reference's largest value. A float32 halfway between
two bfloat16 or int8 values can be rounded to either, and the reference doesn't round queries and attention weights."""


LORA_TOLERANCE = 1e-5
"""Tolerated error of an adapter's product, relative to the reference's largest value."""


def self_test(kernels: CpuKernels) -> None:
    """Raise RuntimeError if a product has other bits than the reference's, or an adapter or attention other values."""
    generator = torch.Generator().manual_seed(0)
    # More tokens than any instruction set multiplies at once, some of which have outliers, and a padded last block.
    x = torch.randn(35, 1100, generator=generator)
    x[::3, 7] *= 100
    weight = torch.randint(-127, 128, (100, 1100), generator=generator, dtype=torch.int8)
    layer, terms = LinearWeight(weight, torch.rand(100, generator=generator) + 0.5), ActivationTerms(4.0)
    if not torch.equal(run_linear(kernels, x, layer, terms), cpu_reference.linear(x, layer, terms)):
        raise RuntimeError("a product isn't exact")
    _test_lora(kernels, x, generator)
    # 80 tokens at once: on AMX two tiles of queries, and a tail of 16 dimensions.
    _test_attention(kernels, torch.randn(100, 8, 48, generator=generator))


def run_linear(
    kernels: CpuKernels, x: torch.Tensor, layer: LinearWeight, terms: ActivationTerms, lora: PackedLora | None = None
) -> torch.Tensor:
    """Return the kernels' result of one linear layer for x [tokens, inputs]. lora: the adapter of all tokens."""
    packed = pack_linear(kernels, layer)
    tokens, inputs = x.shape
    wide = torch.nn.functional.pad(x, (0, padded(inputs) - inputs)).contiguous()
    y = torch.full((tokens, packed.matrix.outputs), torch.nan)
    room = QuantizedTokens(tokens, wide.shape[1], inputs, terms)
    structure = None if lora is None else lora.structure
    ranks = torch.empty(tokens, 0 if structure is None else RANKS * structure.rank_blocks)
    kernels.linear(
        packed.matrix, room.structure, structure, ranks.data_ptr(), wide.data_ptr(), tokens, y.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return y[:, : len(layer.weight)]


def _test_lora(kernels: CpuKernels, x: torch.Tensor, generator: torch.Generator) -> None:
    """Test adapters of 20 ranks, which are padded, in both dtypes, beside a layer of zeros."""
    outputs, inputs = 100, x.shape[1]
    channels, columns = pad_channels(torch.arange(outputs)), pad_channels(torch.arange(inputs))
    a, b = torch.randn(20, inputs, generator=generator), torch.randn(outputs, 20, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        weights = LoraWeights(a.to(dtype), b.to(dtype), 0.25)
        lora = PackedLora([LoraPart(weights, 0, 0)], channels, columns, 1.0)
        added = run_linear(kernels, x, _zeros(outputs, inputs), TWO_TERMS, lora)
        reference = 0.25 * x.double() @ weights.a.double().T @ weights.b.double().T
        error = (added - reference).abs().max().item() / reference.abs().max().item()
        if not error <= LORA_TOLERANCE:
            raise RuntimeError(f"an adapter's product is wrong by {error:.1%} of the largest value")


def _test_attention(kernels: CpuKernels, qkv: torch.Tensor) -> None:
    """Test the attention of a sequence in two chunks, on scattered pages. qkv: [tokens, 4 + 2 + 2 heads, dim]."""
    tokens, _, dim = qkv.shape
    architecture = Architecture(
        "llama", 1, 64, 4, 2, dim, 64, 64, 1e-5, dim**-0.5, tied=False, windows=(None,), ropes=(ROPE,), rotary=dim
    )
    linears = _zeros(8 * dim, 64), _zeros(64, 4 * dim), _zeros(128, 64), _zeros(64, 64)
    layer = LayerWeights(None, linears[0], linears[1], None, linears[2], linears[3])
    angles = torch.arange(tokens)[:, None] * torch.logspace(0, -3, dim // 2)
    tables = {ROPE: (angles.cos(), angles.sin())}
    packed, head = pack_layer(kernels, architecture, layer), pack_linear(kernels, _zeros(64, 64))
    llama = PackedLlama(kernels, architecture, Embedding(torch.empty(0)), [packed], torch.ones(64), head, tables)
    for dtype in CACHE_TYPES:
        forward = CpuForward(llama, KVCacheShape(1, 1, 2, tokens, dim, dtype, CPU_PAGE_SIZE, 7), tokens)
        forward.cache.set_pages(0, 0, (2, 3, 1, 7, 5, 6, 4))
        slots, positions = torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens)
        chunks = (slice(0, 20), slice(20, tokens))
        result = torch.cat([forward.attention(qkv[chunk], slots[chunk], positions[chunk]) for chunk in chunks])
        expected = cpu_reference.attention(qkv, architecture, 0, layer, tables, dtype)
        error = (result - expected).abs().max().item() / expected.abs().max().item()
        if not error <= TOLERANCE[dtype]:  # a NaN fails too
            raise RuntimeError(f"the attention is wrong by {error:.1%} of the largest value")


def _zeros(outputs: int, inputs: int) -> LinearWeight:
    return LinearWeight(torch.zeros(outputs, inputs, dtype=torch.int8), torch.ones(outputs))
