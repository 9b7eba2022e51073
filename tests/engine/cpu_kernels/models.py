"""Small random Llamas for the CPU kernels, and the kernels of every instruction set.

Those that this machine can't run are compiled with emulated instructions (emulated.cpp).
"""

import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.int8_layers import AUTO, random_weight
from llama_engine.checkpoint.architecture import ROPE, Architecture
from llama_engine.checkpoint.lora import LoraAdapter, LoraWeights
from llama_engine.checkpoint.rope import RopeTables
from llama_engine.checkpoint.tensor_names import SavedLinear, layer_linears
from llama_engine.checkpoint.weights import Embedding, LayerWeights, LinearWeight
from llama_engine.kernels.activation_terms import ActivationTerms
from llama_engine.kernels.cache_shape import CPU_PAGE_SIZE, KVCacheShape
from llama_engine.kernels.cpu import cpu_reference
from llama_engine.kernels.cpu.bindings import CpuKernels
from llama_engine.kernels.cpu.build import (
    COMMON_FLAGS,
    COMPILER_FLAGS,
    SOURCES,
    compile_object,
    compile_to,
    find_compiler,
    object_path,
)
from llama_engine.kernels.cpu.forward import CpuForward, PackedLlama
from llama_engine.kernels.cpu.instruction_sets import runnable_instruction_sets
from llama_engine.kernels.cpu.packing import pack_head, pack_layer, padded_head_dim
from llama_engine.kernels.lora_layout import LoraLimits, LoraPart, lora_parts
from torch.nn import functional


def compiles(compiler: list[str], name: str) -> bool:
    """Return whether the compiler knows the options of an instruction set."""
    command = [*compiler, *COMPILER_FLAGS[name], "-fsyntax-only", "-x", "c++", "/dev/null"]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


RUNNABLE = runnable_instruction_sets()
if not RUNNABLE:
    pytest.skip("this CPU has no AVX2", allow_module_level=True)

EMULATED = {"avx512-amx": ["-DPAIRS", "-DTILES"], "avx512-bf16": ["-DPAIRS"], "avx512-vnni": []}
"""Compiler options of emulated.cpp by instruction set."""
EMULATED_DIRECTORY = Path(__file__).parents[3] / ".work" / "emulated"

LAYERS = 2


def llama_of(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    vocabulary: int,
    scaling: float,
    layers: int = LAYERS,
    **options: Any,  # noqa: ANN401 - the fields' types
) -> Architecture:
    """Return the architecture of a Llama of this size, with options of other families."""
    defaults: dict[str, Any] = {"epsilon": 1e-5}
    defaults |= {"windows": (None,) * layers, "ropes": (ROPE,) * layers, "rotary": head_dim, "tied": False}
    return Architecture(
        model_type="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        intermediate=intermediate, vocabulary=vocabulary, scaling=scaling, **{**defaults, **options},
    )  # fmt: skip


PLAIN = llama_of(128, 4, 2, 32, 192, 256, 32**-0.5)
POSITIONS = 64
"""Positions of RoPE's tables."""


@cache
def kernels(name: str) -> CpuKernels:
    """Return an instruction set's kernels, compiled if they aren't; skip without a compiler.

    Their instructions are emulated where this machine doesn't have them, or if "emulated " precedes the name.
    """
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    if name not in RUNNABLE:
        return _emulated(name.removeprefix("emulated "), compiler)
    if not compiles(compiler, name):
        pytest.skip(f"no C++ compiler that knows {name}")
    assert compile_object(compiler, name) is None
    return CpuKernels(name, object_path(name))


def peer(name: str, cache: torch.dtype = torch.bfloat16) -> str:
    """Return the kernels that must give the same bits as an instruction set's.

    With a bfloat16 cache AMX adds in an order of its own; without AMX its emulation is compared with itself.
    """
    return "emulated avx512-amx" if (name, cache) == ("avx512-amx", torch.bfloat16) else "avx2"


def _emulated(name: str, compiler: list[str]) -> CpuKernels:
    options = [*COMMON_FLAGS, *COMPILER_FLAGS["avx2"], *EMULATED[name], "-O1", "-Wno-psabi", f"-I{SOURCES}"]
    source = Path(__file__).with_name("emulated.cpp")
    # Compilation takes ten seconds.
    content = hashlib.sha256(" ".join(options).encode() + source.read_bytes()).hexdigest()
    path = EMULATED_DIRECTORY / f"{content[:16]}-{object_path(name).name}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        assert compile_to(path, [*compiler, *options, str(source)]) is None
    return CpuKernels(name, path)


PER_CHANNEL = (8, None, False)
GROUPS = (PER_CHANNEL, (4, 32, False), (8, 64, True), (4, 64, True), (8, 32, False))
"""Of the linear layers of a Llama in groups: bits, columns of a group, offsets and an order."""


@dataclass
class SmallLlama:
    """A random Llama: as it is read, and its embedding."""

    architecture: Architecture
    layers: list[LayerWeights]
    norm: torch.Tensor
    head: LinearWeight
    embedding: torch.Tensor
    tables: RopeTables

    def packed(self, kernels: CpuKernels, terms: ActivationTerms = AUTO) -> PackedLlama:
        """Pack it for the kernels."""
        layers = [pack_layer(kernels, self.architecture, layer) for layer in self.layers]
        head = pack_head(kernels, self.architecture, self.head)
        return PackedLlama(
            kernels, self.architecture, Embedding(self.embedding), layers, self.norm, head, self.tables, terms
        )

    def cache_shape(self, slots: int, dtype: torch.dtype) -> KVCacheShape:
        """Return the KV cache of `slots` sequences of up to POSITIONS tokens, with pages for all."""
        heads, dim = self.architecture.kv_heads, padded_head_dim(self.architecture)
        pages = slots * POSITIONS // CPU_PAGE_SIZE
        return KVCacheShape(len(self.layers), slots, heads, POSITIONS, dim, dtype, CPU_PAGE_SIZE, pages)

    def reference(self, tokens: torch.Tensor, adapter: LoraAdapter | None = None) -> torch.Tensor:
        """Return the logits of a sequence in float64. Activations are not quantized, nor is the KV cache."""
        a, x = self.architecture, self.embedding[tokens].double()
        for index, unadapted in enumerate(self.layers):
            layer = unadapted if adapter is None else _merged(a, unadapted, adapter.layers[index])
            qkv = _product(cpu_reference.normalize(x, layer.attention_norm, a.epsilon), layer.query_key_value)
            heads = qkv.view(len(x), -1, a.head_dim)
            attended = cpu_reference.attention(heads, a, index, layer, self.tables, torch.float64).flatten(1)
            output = _product(attended, layer.attention_output)
            x = x + a.residual_scale * cpu_reference.normalize(output, layer.attention_output_norm, a.epsilon)
            gate, up = _product(cpu_reference.normalize(x, layer.mlp_norm, a.epsilon), layer.gate_up).chunk(2, dim=-1)
            gated = functional.silu(gate) if a.activation == "silu" else functional.gelu(gate, approximate="tanh")
            output = _product(gated * up, layer.down)
            x = x + a.residual_scale * cpu_reference.normalize(output, layer.mlp_output_norm, a.epsilon)
        logits = _product(cpu_reference.normalize(x, self.norm, a.epsilon), self.head) * a.logits_scale
        return cpu_reference.soft_cap(logits, a.logits_softcap)


def random_adapter(architecture: Architecture, seed: int, rank: int, dtype: torch.dtype) -> LoraAdapter:
    """Return a random adapter; some of its linear layers have half the rank, or none."""
    generator = torch.Generator().manual_seed(seed)

    def weights(linear: SavedLinear, own: int) -> LoraWeights:
        outputs, inputs = linear.shape
        a, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((own, inputs), (outputs, own)))
        return LoraWeights(a, b, 0.5 / (inputs * own) ** 0.5)

    ranks = cycle((rank, max(rank // 2, 1), rank, 0))
    linears = [linear for fused in layer_linears(architecture).values() for linear in fused]
    layers = [
        {linear.name: weights(linear, own) for linear, own in zip(linears, ranks, strict=False) if own}
        for _ in range(architecture.layers)
    ]
    return LoraAdapter(f"{seed}", rank, tuple(layers))


def _merged(architecture: Architecture, layer: LayerWeights, adapter: Mapping[str, LoraWeights]) -> LayerWeights:
    """Return a decoder layer whose linear layers have an adapter's products in their weights, in float64."""

    def merged(weight: LinearWeight, parts: list[LoraPart]) -> LinearWeight:
        values = weight.dequantized().double()
        for part in parts:
            added = part.weights.scaling * part.weights.b.double() @ part.weights.a.double()
            values[part.first_output : part.first_output + len(added)] += added
        return LinearWeight(values, bias=weight.bias)

    parts = lora_parts(architecture, adapter)
    return replace(
        layer,
        query_key_value=merged(layer.query_key_value, parts["query_key_value"]),
        attention_output=merged(layer.attention_output, parts["attention_output"]),
        gate_up=merged(layer.gate_up, parts["gate_up"]),
        down=merged(layer.down, parts["down"]),
    )


def _product(x: torch.Tensor, layer: LinearWeight) -> torch.Tensor:
    weight = layer.weight if layer.weight.dtype == torch.float64 else layer.dequantized().double()
    y = x @ weight.T
    return y if layer.bias is None else y + layer.bias.double()


@cache
def small_llama(architecture: Architecture = PLAIN, bias: bool = False, grouped: bool = False) -> SmallLlama:
    """Return the random Llama of this architecture. grouped: most linear layers are in groups of columns."""
    generator = torch.Generator().manual_seed(1)
    a = architecture
    width = a.heads * a.head_dim

    kinds = cycle(GROUPS if grouped else (PER_CHANNEL,))

    def linear(outputs: int, inputs: int) -> LinearWeight:
        return random_weight(outputs, inputs, bias, *next(kinds), generator)

    def gain(size: int = a.hidden) -> torch.Tensor:
        return torch.rand(size, generator=generator) + 0.5

    def norm(exists: bool) -> torch.Tensor | None:
        return gain() if exists else None

    def layer() -> LayerWeights:
        weights = LayerWeights(
            norm(a.norm_before), linear(width + 2 * a.kv_heads * a.head_dim, a.hidden), linear(a.hidden, width),
            norm(a.norm_before), linear(2 * a.intermediate, a.hidden), linear(a.hidden, a.intermediate),
            attention_output_norm=norm(a.norm_after), mlp_output_norm=norm(a.norm_after),
        )  # fmt: skip
        if a.query_key_norm == "none":
            return weights
        heads = (a.heads, a.kv_heads) if a.query_key_norm == "projection" else (1, 1)
        query_norm, key_norm = (gain(count * a.head_dim) for count in heads)
        return replace(weights, query_norm=query_norm, key_norm=key_norm)

    angles = torch.arange(POSITIONS)[:, None] * torch.logspace(0, -3, a.rotary // 2)
    return SmallLlama(
        a,
        [layer() for _ in range(a.layers)],
        gain(),
        linear(a.vocabulary, a.hidden),
        torch.randn(a.vocabulary, a.hidden, generator=generator),
        {ROPE: (angles.cos(), angles.sin())},
    )


@dataclass
class Runner:
    """A small Llama with a KV cache of five slots."""

    llama: SmallLlama
    forward: CpuForward

    def logits(self, tokens: torch.Tensor, slots: torch.Tensor | int, positions: torch.Tensor | int) -> torch.Tensor:
        """Run tokens and return their logits. positions: a number is the first token's."""
        if isinstance(slots, int):
            slots = torch.full((len(tokens),), slots)
        if isinstance(positions, int):
            positions = positions + torch.arange(len(tokens))
        x = self.llama.embedding[tokens]
        return self.forward.logits(self.forward.forward(x, slots, positions))


def runner(
    name: str,
    llama: SmallLlama | None = None,
    cache: torch.dtype = torch.bfloat16,
    terms: ActivationTerms = AUTO,
    room: int = 64,
    adapters: Sequence[LoraAdapter] = (),
) -> Runner:
    """Return a runner of an instruction set's kernels with an empty cache and pages for every slot.

    adapters: loaded as 1, 2, …
    """
    llama = llama or small_llama()
    loras = LoraLimits(len(adapters), max((adapter.rank for adapter in adapters), default=0))
    forward = CpuForward(llama.packed(kernels(name), terms), llama.cache_shape(5, cache), room, loras)
    for index, adapter in enumerate(adapters, 1):
        forward.loras.load(index, adapter)
    pages = forward.cache.shape.pages // forward.cache.shape.slots
    for slot in range(forward.cache.shape.slots):
        forward.cache.set_pages(slot, 0, range(1 + slot * pages, 1 + (slot + 1) * pages))
    return Runner(llama, forward)


def random_tokens(count: int, seed: int, vocabulary: int = PLAIN.vocabulary) -> torch.Tensor:
    """Return token ids."""
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed))
