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
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from llama_engine.errors import CheckpointError
from llama_engine.kernels.gpu.elementwise import SEPARATE, Elementwise, choose_elementwise
from llama_engine.kernels.gpu.varlen_attention import VarlenAttention, choose_attention
from llama_engine.model.activation_terms import ONE_TERM, TWO_TERMS, ActivationTerms, activation_terms
from llama_engine.model.architecture import Architecture
from llama_engine.model.builder import PackLinear, ReadWeights, build_llama, float_linear, llama_around
from llama_engine.model.checkpoint_headers import CheckpointHeaders
from llama_engine.model.cpu_runner import CompiledLlama, build_compiled_llama
from llama_engine.model.formats.bitsandbytes_nf4 import BitsandbytesNf4
from llama_engine.model.formats.detection import linear_format
from llama_engine.model.formats.linear_format import LinearFormat
from llama_engine.model.llama import Llama
from llama_engine.model.model_info import BATCH, ModelInfo
from llama_engine.model.onednn_int8 import OneDnnPacker
from llama_engine.model.precision import (
    choose_cache_dtype,
    choose_dtype,
    choose_quantization,
    quantization_config,
    saved_quantization,
)
from llama_engine.model.rope import RopeTables, rope_tables
from llama_engine.model.row_reader import RowReader
from llama_engine.model.saved_tensors import SavedTensors
from llama_engine.model.tensor_names import all_linears
from llama_engine.model.weight_reader import WeightReader
from llama_engine.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_log = logging.getLogger(__name__)

Loaded = tuple[Llama | CompiledLlama, ModelInfo, VarlenAttention | None]
"""A model, its precision and size, and FlashAttention for a GPU; None uses PyTorch's attention."""


class LoadPlan(NamedTuple):
    """How a checkpoint is served, with its headers checked.

    quantization, threshold: of `choose_quantization`. quantized: format of the linear layers. terms: activation terms
    of INT8 products; on a GPU, the same for all rows. compiled_cache: dtype of the KV cache with which the compiled
    kernels are verified; None: they aren't used.
    """

    quantization: str
    threshold: float | None
    dtype: torch.dtype
    device: torch.device
    terms: ActivationTerms
    quantized: LinearFormat | None
    reader: WeightReader
    tables: RopeTables
    attention: VarlenAttention | None
    elementwise: Elementwise
    compiled_cache: torch.dtype | None

    @property
    def by_transformers(self) -> bool:
        """Whether transformers' modules hold the weights."""
        return self.quantization == "nf4" or bool(self.threshold)

    @property
    def exact_int8(self) -> bool:
        """Whether the linear layers are exact INT8 products."""
        return self.quantization == "int8" and not self.threshold

    def packer(self) -> PackLinear:
        """Return what packs a `Llama`'s linear layers; raises CheckpointError for a shape without an exact product."""
        if not self.exact_int8:
            return float_linear
        if self.device.type == "cpu":
            return OneDnnPacker(self.terms)
        # Imported here because importing bitsandbytes takes 2 s.
        from llama_engine.kernels.gpu.exact_int8 import exact_int8_linear

        return partial(exact_int8_linear, terms=_gpu_terms(self.terms), elementwise=self.elementwise)

    def info(self, linears: Mapping[str, int], weight_bytes: int, model: Llama | CompiledLlama) -> ModelInfo:
        """Return the info of a model with these weights."""
        product, bits_depend_on = "", BATCH
        if isinstance(model, CompiledLlama):
            product, bits_depend_on = model.describe(), ""
        elif self.exact_int8 and self.device.type == "cuda":
            product = f"exact INT8, {self.terms.describe()}, bitsandbytes"
        elif self.exact_int8:
            product = OneDnnPacker(self.terms).describe()
            # torch computes everything else in the dtype; only in float32 is that independent of the batch.
            bits_depend_on = "" if self.dtype == torch.float32 else BATCH
        return ModelInfo(dict(linears), weight_bytes, self.dtype, self.device, self.threshold, product, bits_depend_on)


def load_model(
    name: str, headers: CheckpointHeaders, settings: Settings, device: torch.device, max_model_len: int
) -> Loaded:
    """Load a checkpoint's weights for the product that the table above lists.

    Raises CheckpointError for incompatible settings and for INT8 weights without an exact product. Exceptions of the
    libraries are passed on.
    """
    plan = plan_load(name, headers, settings, device, max_model_len)
    if plan.by_transformers:
        return _load_with_transformers(headers, settings, plan)
    architecture, tables, read = headers.architecture, plan.tables, ReadWeights()
    model: Llama | CompiledLlama | None = None
    if plan.compiled_cache is not None:
        model = build_compiled_llama(plan.reader, architecture, tables, plan.terms, plan.compiled_cache, read)
    if model is None:
        reader = RowReader(plan.reader) if plan.exact_int8 else plan.reader
        llama = build_llama(reader, architecture, tables, plan.packer(), read)
        model = replace(llama, rotary=plan.elementwise.rotary)
    _return_freed_memory()
    return model, plan.info(read.linears, read.bytes, model), plan.attention


def plan_load(
    name: str, headers: CheckpointHeaders, settings: Settings, device: torch.device, max_model_len: int
) -> LoadPlan:
    """Choose how to serve a checkpoint, and check its headers. Raises CheckpointError as `load_model` does."""
    config, architecture, saved, gguf = headers
    dtype = choose_dtype(name, architecture.model_type, settings.dtype, device)
    quantization, threshold = choose_quantization(name, config, settings)
    int8 = quantization == "int8"
    if gguf is not None and (quantization == "nf4" or threshold):
        raise CheckpointError(f"{name} is a GGUF file; nf4 and an int8_threshold need a checkpoint in safetensors")
    # Compares the files with the config, before memory is allocated for what the config says.
    quantized = _saved_format(saved, config, int8)
    reader = WeightReader(saved, architecture, dtype, quantized, int8 or quantized is not None, device)
    terms = activation_terms(settings.int8_terms, settings.int8_outlier_ratio)
    if device.type == "cuda" and terms != ONE_TERM:
        # On a GPU every row has as many terms: which rows have outliers would have to be read from the device.
        terms = TWO_TERMS
    exact = int8 and not threshold
    compiled = exact and device.type == "cpu" and settings.kernels != "stock"
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
        compiled_cache=choose_cache_dtype(settings.kv_cache_dtype, compiled=True, dtype=dtype) if compiled else None,
    )


def _gpu_terms(terms: ActivationTerms) -> int:
    """Return the number of terms of INT8 products on a GPU."""
    return 1 if terms == ONE_TERM else 2


def _saved_format(saved: SavedTensors, config: PreTrainedConfig, int8: bool) -> LinearFormat | None:
    """Return the format in which the checkpoint's linear layers are read; None is floats. int8: serve INT8."""
    if saved_quantization(config)[0] == "nf4":
        return BitsandbytesNf4(saved)
    return linear_format(saved, quantization_config(config)) if int8 else None


def _load_with_transformers(headers: CheckpointHeaders, settings: Settings, plan: LoadPlan) -> Loaded:
    """Load the model with transformers' modules."""
    if isinstance(plan.quantized, BitsandbytesNf4):
        for linear in all_linears(headers.architecture):
            if plan.quantized.has(linear):
                plan.quantized.check_description(linear)
    # Imported here because importing bitsandbytes and transformers' modelling code takes 2 s.
    from llama_engine.model.transformers_reader import load_with_transformers, read_model_info

    modules = load_with_transformers(str(headers.folder), headers.config, settings, plan.device, plan.dtype)
    model = llama_around(modules, headers.architecture, plan.tables)
    return replace(model, rotary=plan.elementwise.rotary), read_model_info(modules), plan.attention


def _gpu_attention(
    architecture: Architecture, settings: Settings, device: torch.device, dtype: torch.dtype
) -> VarlenAttention | None:
    """Return FlashAttention for a GPU; None selects attention with masks, which supports a cache in any dtype."""
    cached = choose_cache_dtype(settings.kv_cache_dtype, compiled=False, dtype=dtype)
    if device.type != "cuda" or settings.kernels == "stock" or dtype == torch.float32 or cached != dtype:
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


def _return_freed_memory() -> None:
    """Return memory freed by packing to the system; glibc could otherwise retain as much as the model's size."""
    with suppress(AttributeError):
        # Other C libraries don't have malloc_trim and don't need it.
        ctypes.CDLL(None).malloc_trim(0)
