"""Small random Llamas for the CPU kernels, and the kernels of every instruction set.

Those that this machine can't run are compiled with emulated instructions (emulated.cpp).
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from engine.int8_layers import AUTO
from llama_engine.kernels.cpu import cpu_reference
from llama_engine.kernels.cpu.build import (
    COMMON_FLAGS,
    INSTRUCTION_SETS,
    SOURCES,
    compile_object,
    compile_to,
    find_compiler,
    object_path,
)
from llama_engine.kernels.cpu.forward import CpuForward, CpuLlama
from llama_engine.kernels.cpu.instruction_sets import allowed_instruction_sets, request_amx
from llama_engine.kernels.cpu.library import CpuKernels
from llama_engine.kernels.cpu.packing import Dimensions, pack_layer, pack_linear
from llama_engine.model.activation_terms import ActivationTerms
from llama_engine.model.kv_cache import CPU_PAGE_SIZE, KVCacheShape
from llama_engine.model.weights import LayerWeights, LinearWeight


def _runnable() -> list[str]:
    """Return the instruction sets of this machine; AMX only where the kernel grants its registers."""
    names = allowed_instruction_sets()
    if "avx512-amx" in names:
        try:
            request_amx()
        except OSError:
            names.remove("avx512-amx")
    return names


def compiles(compiler: list[str], name: str) -> bool:
    """Return whether the compiler knows the options of an instruction set."""
    command = [*compiler, *INSTRUCTION_SETS[name], "-fsyntax-only", "-x", "c++", "/dev/null"]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


RUNNABLE = _runnable()
if not RUNNABLE:
    pytest.skip("this CPU has no AVX2", allow_module_level=True)

EMULATED = {"avx512-amx": ["-DTILES"], "avx512-vnni": []}
"""Compiler options of emulated.cpp by instruction set."""

PLAIN = Dimensions(128, 4, 2, 32, 192, 256, 1e-5, 32**-0.5)
POSITIONS = 64
"""Positions of RoPE's tables."""


@cache
def kernels(name: str) -> CpuKernels:
    """Return an instruction set's kernels, compiled if they aren't; skip without a compiler.

    Their instructions are emulated where this machine doesn't have them.
    """
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    if name not in RUNNABLE:
        return _emulated(name, compiler)
    if not compiles(compiler, name):
        pytest.skip(f"no C++ compiler that knows {name}")
    assert compile_object(compiler, name) is None
    return CpuKernels(name, object_path(name))


def _emulated(name: str, compiler: list[str]) -> CpuKernels:
    options = [*COMMON_FLAGS, *INSTRUCTION_SETS["avx2"], *EMULATED[name], "-O1", "-Wno-psabi", f"-I{SOURCES}"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "emulated.so"
        assert compile_to(path, [*compiler, *options, str(Path(__file__).with_name("emulated.cpp"))]) is None
        return CpuKernels(name, path)


def random_linear(outputs: int, inputs: int, generator: torch.Generator, bias: bool = False) -> LinearWeight:
    """Return an INT8 layer whose outputs are about as large as its inputs."""
    weight = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    scales = (torch.rand(outputs, generator=generator) + 0.5) / 127 * 1.7 * inputs**-0.5
    return LinearWeight(weight, scales, torch.randn(outputs, generator=generator) if bias else None)


@dataclass
class SmallLlama:
    """A random Llama: as it is read, and its embedding."""

    dimensions: Dimensions
    layers: list[LayerWeights]
    norm: torch.Tensor
    head: LinearWeight
    embedding: torch.Tensor
    tables: tuple[torch.Tensor, torch.Tensor]

    def packed(self, kernels: CpuKernels, terms: ActivationTerms = AUTO) -> CpuLlama:
        """Pack it for the kernels."""
        layers = [pack_layer(kernels, self.dimensions, layer) for layer in self.layers]
        head = pack_linear(kernels, self.head)
        return CpuLlama(kernels, self.dimensions, layers, self.norm, head, *self.tables, terms)

    def cache_shape(self, slots: int, dtype: torch.dtype, tokens: int = POSITIONS) -> KVCacheShape:
        """Return the KV cache of `slots` sequences of up to `tokens` tokens, with pages for all."""
        d = self.dimensions
        pages = slots * -(-tokens // CPU_PAGE_SIZE)
        return KVCacheShape(len(self.layers), slots, d.kv_heads, tokens, d.padded_head_dim, dtype, CPU_PAGE_SIZE, pages)

    def reference(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of a sequence in float64."""
        x = self.embedding[tokens]
        return cpu_reference.logits(x, self.dimensions, self.layers, self.norm, self.head, self.tables)


@cache
def small_llama(dimensions: Dimensions = PLAIN, layers: int = 2, bias: bool = False) -> SmallLlama:
    """Return the random Llama of these dimensions."""
    generator = torch.Generator().manual_seed(1)
    d = dimensions
    width = d.heads * d.head_dim

    def linear(outputs: int, inputs: int) -> LinearWeight:
        return random_linear(outputs, inputs, generator, bias)

    def gain() -> torch.Tensor:
        return torch.rand(d.hidden, generator=generator) + 0.5

    angles = torch.arange(POSITIONS)[:, None] * torch.logspace(0, -3, d.head_dim // 2)
    return SmallLlama(
        d,
        [
            LayerWeights(
                gain(), linear(width + 2 * d.kv_heads * d.head_dim, d.hidden), linear(d.hidden, width),
                gain(), linear(2 * d.intermediate, d.hidden), linear(d.hidden, d.intermediate),
            )
            for _ in range(layers)
        ],
        gain(),
        linear(d.vocabulary, d.hidden),
        torch.randn(d.vocabulary, d.hidden, generator=generator),
        (angles.cos(), angles.sin()),
    )  # fmt: skip


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
) -> Runner:
    """Return a runner of an instruction set's kernels with an empty cache and pages for every slot."""
    llama = llama or small_llama()
    forward = CpuForward(llama.packed(kernels(name), terms), llama.cache_shape(5, cache), room)
    assign_pages(forward, range(1, forward.cache.pages + 1))
    return Runner(llama, forward)


def assign_pages(forward: CpuForward, pages: Sequence[int]) -> None:
    """Divide the pages among the slots, in this order."""
    each = len(pages) // forward.cache.slots
    for slot in range(forward.cache.slots):
        forward.set_pages(slot, 0, pages[slot * each : (slot + 1) * each])


def random_tokens(count: int, seed: int, vocabulary: int = PLAIN.vocabulary) -> torch.Tensor:
    """Return token ids."""
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed))
