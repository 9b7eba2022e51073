"""Chooses how a checkpoint's linear layers are computed; `loader` loads its weights for that.

| weights | product | batch-invariant |
|---|---|---|
| floats | PyTorch's | no |
| INT8 on a CPU | exact, by the compiled kernels (`kernels.cpu`) | yes |
| | without them, or with `kernels` stock: PyTorch's, of dequantized weights | no |
| INT8 on a GPU | exact, by bitsandbytes' INT8 matrix product (`kernels.gpu.exact_int8`) | no: the attention |
| INT8 with `int8_threshold`, nf4 | bitsandbytes' layers in transformers' modules | no |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from llama_engine.checkpoint.architecture import Architecture
from llama_engine.checkpoint.formats.bitsandbytes_nf4 import BitsandbytesNf4
from llama_engine.checkpoint.formats.detection import linear_format
from llama_engine.checkpoint.formats.linear_format import LinearFormat
from llama_engine.checkpoint.headers import CheckpointHeaders
from llama_engine.checkpoint.per_channel import requantized
from llama_engine.checkpoint.rope import RopeTables, rope_tables
from llama_engine.checkpoint.tensor_names import all_linears
from llama_engine.checkpoint.weight_reader import WeightReader
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.errors import CheckpointError
from llama_engine.kernels.activation_terms import MAX_INPUTS, ONE_TERM, TWO_TERMS, ActivationTerms, activation_terms
from llama_engine.kernels.cpu.bindings import CpuKernels
from llama_engine.kernels.cpu.forward import PackedLlama
from llama_engine.kernels.cpu.instruction_sets import FALLBACK_EFFECT, choose_cpu_kernels
from llama_engine.kernels.cpu.packing import linear_shapes
from llama_engine.kernels.gpu.elementwise import SEPARATE, Elementwise, choose_elementwise
from llama_engine.kernels.gpu.varlen_attention import VarlenAttention, choose_attention
from llama_engine.model.builder import PackLinear, float_linear
from llama_engine.model.llama import Llama
from llama_engine.model.model_info import ModelInfo
from llama_engine.model.precision import (
    choose_cache_dtype,
    choose_dtype,
    choose_quantization,
    quantization_config,
    saved_quantization,
)
from llama_engine.settings import Settings

_log = logging.getLogger(__name__)

ModelParts = tuple[Llama | PackedLlama, ModelInfo, VarlenAttention | None]
"""A model, its precision and size, and FlashAttention for a GPU; None uses PyTorch's attention."""


class LinearLayers(NamedTuple):
    """The functions that make the linear layers of a `Llama`.

    convert: returns the weight that the layer holds, from the one that was read. pack: returns the layer of that
    weight. product: description of the product of INT8 weights, for the log and the metrics; empty for floats.
    """

    convert: Callable[[LinearWeight], LinearWeight]
    pack: PackLinear
    product: str = ""


class LoadPlan(NamedTuple):
    """The decisions on how a checkpoint is served. Its headers have been checked.

    quantization, threshold: what `choose_quantization` returns. quantized: format of the linear layers. terms: the
    activation terms of INT8 products; on a GPU, the same for all tokens. kernels: the compiled kernels; None: PyTorch
    computes.
    """

    quantization: str
    threshold: float
    dtype: torch.dtype
    device: torch.device
    terms: ActivationTerms
    quantized: LinearFormat | None
    reader: WeightReader
    tables: RopeTables
    attention: VarlenAttention | None
    elementwise: Elementwise
    kernels: CpuKernels | None

    @property
    def by_transformers(self) -> bool:
        """Whether transformers' modules hold the weights."""
        return self.quantization == "nf4" or self.threshold > 0

    @property
    def reads_int8(self) -> bool:
        """Whether `reader` returns INT8 weights: for exact products, or to dequantize them."""
        return self.quantization == "int8" and not self.threshold

    def linear_layers(self) -> LinearLayers:
        """Return how a `Llama`'s linear layers are made; theirs raise CheckpointError without an exact product."""
        if not self.reads_int8:
            return LinearLayers(lambda weight: weight, float_linear)
        if self.device.type == "cpu":
            name = str(self.dtype).removeprefix("torch.")
            return LinearLayers(partial(_dequantized, self.dtype), float_linear, f"INT8 weights dequantized to {name}")
        # Imported here because importing bitsandbytes takes 2 s.
        from llama_engine.kernels.gpu.exact_int8 import exact_int8_linear

        pack = partial(exact_int8_linear, terms=_gpu_terms(self.terms), elementwise=self.elementwise)
        return LinearLayers(requantized, pack, f"exact INT8, {self.terms.describe()}, bitsandbytes")

    def info(self, linears: Mapping[str, int], weight_bytes: int, model: Llama | PackedLlama) -> ModelInfo:
        """Return the info of a model with these weights. linears: number of linear layers by weight dtype.

        Only a model packed for the compiled kernels is batch-invariant.
        """
        if isinstance(model, PackedLlama):
            product, batch_invariant = model.describe(), True
        else:
            product, batch_invariant = self.linear_layers().product, False
        return ModelInfo(dict(linears), weight_bytes, self.dtype, self.device, self.threshold, product, batch_invariant)


def plan_load(
    name: str, headers: CheckpointHeaders, settings: Settings, device: torch.device, max_model_len: int
) -> LoadPlan:
    """Choose how to serve a checkpoint, and check its headers.

    Raises CheckpointError for incompatible settings and for headers that don't fit the config.
    """
    config, architecture, saved, gguf = headers
    dtype = choose_dtype(name, architecture.model_type, settings.dtype, device)
    quantization, threshold = choose_quantization(name, config, settings)
    int8 = quantization == "int8"
    if (gguf is not None or not architecture.has_head) and (quantization == "nf4" or threshold):
        kind = "is a GGUF file" if gguf is not None else "has no output head (lm_head)"
        raise CheckpointError(f"{name} {kind}; nf4 and an int8_threshold need a checkpoint in safetensors with a head")
    # This compares the files with the config, before memory is allocated for what the config says.
    quantized: LinearFormat | None = None
    if saved_quantization(config) == "nf4":
        quantized = BitsandbytesNf4(saved)
    elif int8:
        quantized = linear_format(saved, quantization_config(config))
    reader = WeightReader(saved, architecture, dtype, quantized, int8 or quantized is not None, device)
    terms = activation_terms(settings.int8_terms, settings.int8_outlier_ratio)
    if device.type == "cuda" and terms != ONE_TERM:
        # On a GPU every token has as many terms: which ones have outliers would have to be read from the device.
        terms = TWO_TERMS
    exact = int8 and not threshold
    if exact and device.type == "cuda" and quantized is not None and _has_groups(quantized, architecture):
        _log.warning("linear layers in groups of columns are requantized to INT8 per channel")
    return LoadPlan(
        quantization=quantization,
        threshold=threshold,
        dtype=dtype,
        device=device,
        terms=terms,
        quantized=quantized,
        reader=reader,
        tables=rope_tables(config, architecture, max_model_len),
        attention=_gpu_attention(architecture, settings, device, dtype),
        elementwise=_gpu_elementwise(architecture, settings, device, dtype, _gpu_terms(terms) if exact else None),
        kernels=_cpu_kernels(settings, architecture) if exact and device.type == "cpu" else None,
    )


def _has_groups(quantized: LinearFormat, architecture: Architecture) -> bool:
    return any(quantized.has(linear) and quantized.groups(linear) for linear in all_linears(architecture))


def _cpu_kernels(settings: Settings, architecture: Architecture) -> CpuKernels | None:
    """Return the compiled kernels, or None and log why, and what that costs.

    Raises CheckpointError for a layer that they don't compute exactly.
    """
    if settings.kernels == "stock":
        _log.warning("kernels is stock: %s", FALLBACK_EFFECT)
        return None
    kernels = choose_cpu_kernels()
    inputs = max(inputs for _, inputs in linear_shapes(architecture).values())
    if kernels is not None and inputs > MAX_INPUTS:
        raise CheckpointError(
            f"a linear layer has {inputs} inputs, and the CPU kernels' sums are exact for up to {MAX_INPUTS}; with "
            f"kernels set to stock it is dequantized"
        )
    return kernels


def _dequantized(dtype: torch.dtype, weight: LinearWeight) -> LinearWeight:
    """Return an INT8 weight in floats."""
    return LinearWeight(weight.dequantized().to(dtype), bias=weight.bias)


def _gpu_terms(terms: ActivationTerms) -> int:
    """Return the number of terms of INT8 products on a GPU."""
    return 1 if terms == ONE_TERM else 2


def _gpu_attention(
    architecture: Architecture, settings: Settings, device: torch.device, dtype: torch.dtype
) -> VarlenAttention | None:
    """Return FlashAttention for a GPU; None selects attention with masks, which supports a cache in any dtype."""
    cache_dtype = choose_cache_dtype(settings.kv_cache_dtype, compiled=False, dtype=dtype)
    if device.type != "cuda" or settings.kernels == "stock" or dtype == torch.float32 or cache_dtype != dtype:
        return None
    if architecture.attention_softcap is not None:
        _log.info("attention takes masks: FlashAttention has no soft cap of the scores")
        return None
    group, windowed = architecture.heads // architecture.kv_heads, any(architecture.windows)
    return choose_attention(device, dtype, architecture.head_dim, group, windowed)


def _gpu_elementwise(
    architecture: Architecture, settings: Settings, device: torch.device, dtype: torch.dtype, terms: int | None
) -> Elementwise:
    """Return the elementwise functions, fused for a GPU. terms: INT8 terms of exact products, None without them."""
    if device.type != "cuda" or settings.kernels == "stock":
        return SEPARATE
    heads = architecture.heads + architecture.kv_heads
    fused = choose_elementwise(device, dtype, architecture.hidden, heads, architecture.head_dim, terms)
    # The fused rotation is compiled for whole heads as the projection returns them.
    whole = architecture.rotary == architecture.head_dim and architecture.query_key_norm == "none"
    return fused if whole else fused._replace(rotary=SEPARATE.rotary)
