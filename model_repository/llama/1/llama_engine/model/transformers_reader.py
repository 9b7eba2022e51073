"""Loads a checkpoint with transformers' modules: nf4, and LLM.int8() where the setting `int8_threshold` is above 0.

`WeightReader` reads all other checkpoints. Import this module only when needed: importing bitsandbytes and
transformers' modelling code takes seconds.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch
from bitsandbytes.nn.modules import Int8Params, Linear4bit, Linear8bitLt, Params4bit
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

from llama_engine.checkpoint.architecture import Architecture
from llama_engine.checkpoint.rope import RopeTables
from llama_engine.checkpoint.tensor_names import EMBEDDING, HEAD, NORM, layer_linears, layer_norms, layer_prefix
from llama_engine.errors import CheckpointError
from llama_engine.model.builder import assemble_llama
from llama_engine.model.llama import Layer, Linear, Llama
from llama_engine.model.model_info import ModelInfo
from llama_engine.model.precision import saved_quantization
from llama_engine.settings import Settings

# Drop a warning at every 8-bit product of a model that isn't in float16.
logging.getLogger("bitsandbytes.autograd._functions").addFilter(
    lambda record: "inputs will be cast" not in str(record.msg)
)


def load_with_transformers(
    name: str, config: PreTrainedConfig, settings: Settings, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """Load a checkpoint in the precision of the settings, which must agree with that of a quantized checkpoint.

    name: folder or hub id. dtype: the unquantized parameters'. Raises CheckpointError for missing weights. Exceptions
    of transformers, safetensors, bitsandbytes and accelerate are passed on.
    """
    quantization = _quantization_now(settings, config, dtype)
    loaded = AutoModelForCausalLM.from_pretrained(
        name,
        output_loading_info=True,
        revision=settings.revision,
        dtype=dtype,
        device_map={"": device},
        use_safetensors=True,
        # Mismatched weights are refused below, by name; transformers' error would refer to its silenced report.
        ignore_mismatched_sizes=True,
        # An explicit None makes transformers ignore that a checkpoint is quantized and use its raw bytes as weights.
        **({} if quantization is None else {"quantization_config": quantization}),
    )
    model, loading = cast("tuple[PreTrainedModel, dict[str, set[Any]]]", loaded)
    # Refuse missing weights, which transformers initializes with random numbers.
    if absent := sorted({*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}):
        raise CheckpointError(f"{name} lacks {len(absent)} weights or has them in another shape, first {absent[0]}")
    _convert_parameters(model, dtype, quantized_now=quantization is not None)
    for module in model.modules():
        if isinstance(module, Linear8bitLt):
            # INT8 weights do not depend on the threshold, so it may differ from that of the saved checkpoint.
            module.state.threshold = settings.int8_threshold
    # In training mode bitsandbytes would dequantize the weights at every call.
    model.requires_grad_(False).train(False)
    return model


def llama_around(model: PreTrainedModel, architecture: Architecture, tables: RopeTables) -> Llama:
    """Return a Llama around the modules that transformers loaded, with their linear layers of any kind."""

    def gain(name: str) -> torch.Tensor:
        weight = model.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        return weight.float() + architecture.gain_offset if architecture.gain_offset else weight

    def layer(index: int) -> Layer:
        prefix = layer_prefix(index)
        norms = dict[str, torch.Tensor | None](attention_norm=None, mlp_norm=None)
        norms |= {field: gain(prefix + name) for field, (name, _) in layer_norms(architecture).items()}
        linears = {
            field: _side_by_side([model.get_submodule(prefix + part.name) for part in parts])
            for field, parts in layer_linears(architecture).items()
        }
        return Layer(**norms, **linears)  # type: ignore[arg-type]  # the names are the fields

    embedding = model.get_submodule(EMBEDDING).weight
    assert isinstance(embedding, torch.Tensor)
    layers = [layer(index) for index in range(architecture.layers)]
    return assemble_llama(architecture, tables, embedding, layers, gain(NORM), model.get_submodule(HEAD))


def _side_by_side(linears: Sequence[Linear]) -> Linear:
    if len(linears) == 1:
        return linears[0]
    return lambda activations: torch.cat([linear(activations) for linear in linears], dim=-1)


def read_model_info(model: PreTrainedModel) -> ModelInfo:
    """Return the info of a loaded model, determined from its layers and weights."""
    linears: Counter[str] = Counter()
    thresholds: set[float] = set()
    size = 0
    for module in model.modules():
        if isinstance(module, Linear8bitLt):
            thresholds.add(module.state.threshold)
            # The channels' scales are an attribute of the 8-bit weight, not a parameter.
            scales = getattr(module.weight, "SCB", None)
            size += 0 if scales is None else scales.nbytes
        if isinstance(module, Linear4bit):
            size += sum(scales.nbytes for scales in _scales_of_blocks(module))
        if isinstance(module, torch.nn.Linear):
            nf4 = isinstance(module, Linear4bit)
            linears["nf4" if nf4 else str(module.weight.dtype).removeprefix("torch.")] += 1
    tensors = {tensor.data_ptr(): tensor for tensor in model.parameters()}
    size += sum(tensor.nbytes for tensor in tensors.values())
    embedding = model.get_submodule(EMBEDDING).weight
    assert isinstance(embedding, torch.Tensor)
    return ModelInfo(dict(linears), size, embedding.dtype, embedding.device, max(thresholds, default=0.0))


def _quantization_now(settings: Settings, config: PreTrainedConfig, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    """Return the config for quantization while loading; None keeps the saved precision."""
    if settings.quantization in ("checkpoint", saved_quantization(config)):
        return None
    if settings.quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=settings.int8_threshold)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def _scales_of_blocks(linear: Linear4bit) -> list[torch.Tensor]:
    """Return the scales of a 4-bit layer, and if those are quantized, theirs, too."""
    state = cast("Params4bit", linear.weight).quant_state
    return [state.absmax, *([state.state2.absmax] if state.nested else [])]


def _convert_parameters(model: PreTrainedModel, dtype: torch.dtype, quantized_now: bool) -> None:
    """Cast unquantized parameters to the dtype; on a CPU, copy parameters that are still mapped from the files.

    transformers keeps the saved dtype of unquantized parameters in an 8-bit checkpoint, and leaves unconverted
    parameters memory-mapped. Mapped pages count as free memory, are read from the volume again when memory is short,
    and crash the process if the volume disappears.
    """
    for parameter in model.parameters():
        floats = parameter.is_floating_point()
        mapped = parameter.device.type == "cpu" and (floats or not quantized_now)
        parameter.data = parameter.data.to(dtype if floats else parameter.dtype, copy=mapped)
        if mapped and isinstance(parameter, Int8Params):
            # bitsandbytes has additional references to the weight and its scales.
            parameter.CB = parameter.data
            parameter.SCB = parameter.SCB.clone()
