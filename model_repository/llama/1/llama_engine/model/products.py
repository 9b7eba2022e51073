"""Chooses, once at load, the product of the linear layers, and loads a checkpoint's weights for it: `load_model`.

| weights | product | a row's bits depend on |
|---|---|---|
| floats | PyTorch's | the batch |
| INT8 on a CPU | the compiled kernels (`kernels.cpu`) where they are built and verify | its own request alone |
| | else, or with `kernels` stock, oneDNN's (`onednn_int8`) where it verifies | its own request alone, in float32 |
| INT8 on a GPU | bitsandbytes' INT8 matrix product (`kernels.gpu.exact_int8`) | the batch, by the attention |
| INT8 with an outlier threshold, nf4 | bitsandbytes' layers in transformers' modules | the batch |

INT8 weights without an exact product are refused.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llama_engine.kernels.gpu.elementwise import SEPARATE, Elementwise, choose_elementwise
from llama_engine.kernels.gpu.varlen_attention import VarlenAttention, choose_attention
from llama_engine.model.activation_terms import ONE_TERM, TWO_TERMS, ActivationTerms, activation_terms
from llama_engine.model.builder import ReadWeights, Tables, build_llama, float_linear, llama_around
from llama_engine.model.cpu_runner import CompiledLlama, build_compiled_llama
from llama_engine.model.heads import head_dim, key_value_heads
from llama_engine.model.llama import Llama
from llama_engine.model.model_info import BATCH, ModelInfo
from llama_engine.model.onednn_int8 import OneDnnPacker
from llama_engine.model.precision import choose_cache_dtype, choose_dtype, choose_quantization
from llama_engine.model.rope import rope_tables
from llama_engine.model.weight_reader import WeightReader
from llama_engine.settings import Settings

if TYPE_CHECKING:
    from transformers import LlamaConfig

Loaded = tuple[Llama | CompiledLlama, ModelInfo, VarlenAttention | None]
"""A model, its precision and size, and FlashAttention for a GPU; None uses PyTorch's attention."""


def load_model(
    name: str, folder: Path, config: LlamaConfig, settings: Settings, device: torch.device, max_model_len: int
) -> Loaded:
    """Load the weights in a checkpoint's folder for the product that the table above lists.

    Raises CheckpointError for incompatible settings and for INT8 weights without an exact product. Exceptions of the
    libraries are passed on.
    """
    # With one more position, for padding rows.
    tables = rope_tables(config, max_model_len + 1)
    dtype = choose_dtype(settings.dtype, device)
    quantization, threshold = choose_quantization(name, config, settings)
    attention = _gpu_attention(config, settings, device, dtype)
    exact = quantization == "int8" and not threshold
    terms = activation_terms(settings.int8_terms, settings.int8_outlier_ratio)
    if device.type == "cuda" and terms != ONE_TERM:
        # On a GPU every row has as many terms: which rows have outliers would have to be read from the device.
        terms = TWO_TERMS
    gpu_terms = 1 if terms == ONE_TERM else 2
    elementwise = _gpu_elementwise(config, settings, device, dtype, gpu_terms if exact else None)
    if quantization == "nf4" or threshold:
        modules, info = _load_with_transformers(folder, config, settings, device, dtype, tables)
        return replace(modules, rotary=elementwise.rotary), info, attention
    reader, read = WeightReader(folder, config, dtype, quantization == "int8", device), ReadWeights()
    model: Llama | CompiledLlama
    if quantization != "int8":
        model, product, bits_depend_on = build_llama(reader, config, tables, float_linear, read), "", BATCH
    elif device.type == "cuda":
        # Imported here because importing bitsandbytes takes 2 s.
        from llama_engine.kernels.gpu.exact_int8 import exact_int8_linear

        pack = partial(exact_int8_linear, terms=gpu_terms, elementwise=elementwise)
        model = build_llama(reader, config, tables, pack, read)
        product, bits_depend_on = f"exact INT8, {terms.describe()}, bitsandbytes", BATCH
    elif compiled := _load_compiled(reader, config, tables, settings, terms, read):
        model, product, bits_depend_on = compiled, compiled.describe(), ""
    else:
        packer = OneDnnPacker(terms)
        model, product = build_llama(reader, config, tables, packer, read), packer.describe()
        # torch computes everything besides the products in the dtype; only in float32 is that independent of the batch.
        bits_depend_on = "" if dtype == torch.float32 else BATCH
    if isinstance(model, Llama):
        model = replace(model, rotary=elementwise.rotary)
    _return_freed_memory()
    info = ModelInfo(
        dict(read.linears),
        read.bytes,
        dtype,
        device,
        threshold,
        product=product,
        bits_depend_on=bits_depend_on,
    )
    return model, info, attention


def _load_with_transformers(
    folder: Path, config: LlamaConfig, settings: Settings, device: torch.device, dtype: torch.dtype, tables: Tables
) -> tuple[Llama, ModelInfo]:
    """Load the model with transformers' modules; return it with its info."""
    # Imported here because importing bitsandbytes and transformers' modelling code takes 2 s.
    from llama_engine.model.transformers_reader import load_with_transformers, read_model_info

    modules = load_with_transformers(str(folder), config, settings, device, dtype)
    return llama_around(modules, tables), read_model_info(modules)


def _gpu_attention(
    config: LlamaConfig, settings: Settings, device: torch.device, dtype: torch.dtype
) -> VarlenAttention | None:
    """Return FlashAttention for a GPU; None selects attention with masks, which supports a cache in any dtype."""
    cached = choose_cache_dtype(settings.kv_cache_dtype, compiled=False, dtype=dtype)
    if device.type != "cuda" or settings.kernels == "stock" or dtype == torch.float32 or cached != dtype:
        return None
    return choose_attention(device, dtype, head_dim(config), config.num_attention_heads // key_value_heads(config))


def _gpu_elementwise(
    config: LlamaConfig, settings: Settings, device: torch.device, dtype: torch.dtype, terms: int | None
) -> Elementwise:
    """Return the elementwise functions, fused for a GPU. terms: INT8 terms of exact products, None without them."""
    if device.type != "cuda" or settings.kernels == "stock":
        return SEPARATE
    heads = config.num_attention_heads + key_value_heads(config)
    return choose_elementwise(device, dtype, config.hidden_size, heads, head_dim(config), terms)


def _load_compiled(
    reader: WeightReader,
    config: LlamaConfig,
    tables: Tables,
    settings: Settings,
    terms: ActivationTerms,
    read: ReadWeights,
) -> CompiledLlama | None:
    """Load the model packed for the compiled kernels; return None if they can't be used."""
    if settings.kernels == "stock":
        return None
    dtype = choose_cache_dtype(settings.kv_cache_dtype, compiled=True, dtype=torch.float32)
    return build_compiled_llama(reader, config, tables, terms, dtype, read)


def _return_freed_memory() -> None:
    """Return memory freed by packing to the system; glibc could otherwise retain as much as the model's size."""
    with suppress(AttributeError):
        # Other C libraries don't have malloc_trim and don't need it.
        ctypes.CDLL(None).malloc_trim(0)
