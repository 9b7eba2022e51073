"""What loading a checkpoint would give, from its headers alone: `describe_model` instead of `products.load_model`."""

from __future__ import annotations

import torch

from llama_engine.model.builder import ConvertingReader, ReadWeights, build_llama, float_linear
from llama_engine.model.checkpoint_headers import CheckpointHeaders
from llama_engine.model.cpu_runner import CompiledLlama, compiled_without_weights
from llama_engine.model.llama import Llama
from llama_engine.model.products import Loaded, plan_load
from llama_engine.model.weight_sizes import HeaderReader, module_sizes
from llama_engine.settings import Settings


def describe_model(
    name: str, headers: CheckpointHeaders, settings: Settings, device: torch.device, max_model_len: int
) -> Loaded:
    """Return a model without weights, the info of the loaded one, and its attention on a GPU.

    The kernels are tested as when a model is loaded. Raises CheckpointError as `load_model` does.
    """
    plan = plan_load(name, headers, settings, device, max_model_len)
    architecture, tables, read = headers.architecture, plan.tables, ReadWeights()
    reader = HeaderReader(architecture, plan.dtype, plan.quantized, plan.reads_int8)
    model: Llama | CompiledLlama
    if plan.kernels is not None:
        # It counts the weights.
        build_llama(reader, architecture, tables, float_linear, read)
        model = compiled_without_weights(architecture, tables, plan.terms, plan.kernels)
    else:
        linears = plan.linear_layers()
        model = build_llama(ConvertingReader(reader, linears.convert), architecture, tables, linears.pack, read)
    counts, size = read.linears, read.bytes
    if plan.by_transformers:
        counts, size = module_sizes(headers.saved, architecture, plan.dtype, plan.quantization, plan.quantized)
    return model, plan.info(counts, size, model), plan.attention
