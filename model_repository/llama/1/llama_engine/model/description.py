"""What loading a checkpoint would give, from its headers alone: `describe_model` instead of `products.load_model`."""

from __future__ import annotations

import torch

from llama_engine.model.builder import PackLinear, Reader, ReadWeights, build_llama, float_linear
from llama_engine.model.checkpoint_headers import CheckpointHeaders
from llama_engine.model.cpu_runner import compiled_without_weights
from llama_engine.model.llama import Linear
from llama_engine.model.onednn_int8 import OneDnnPacker
from llama_engine.model.products import Loaded, plan_load
from llama_engine.model.row_reader import RowReader
from llama_engine.model.weight_sizes import HeaderReader, module_sizes
from llama_engine.model.weights import LinearWeight
from llama_engine.settings import Settings


def describe_model(
    name: str, headers: CheckpointHeaders, settings: Settings, device: torch.device, max_model_len: int
) -> Loaded:
    """Return a model without weights, the info of the loaded one, and its attention on a GPU.

    Products are verified as when a model is loaded. Raises CheckpointError as `load_model` does.
    """
    plan = plan_load(name, headers, settings, device, max_model_len)
    architecture, tables, read = headers.architecture, plan.tables, ReadWeights()
    compiled = None
    if plan.compiled_cache is not None:
        compiled = compiled_without_weights(architecture, tables, plan.terms, plan.compiled_cache)
    reader: Reader = HeaderReader(architecture, plan.dtype, plan.quantized, plan.exact_int8)
    pack: PackLinear = float_linear
    if compiled is None and plan.exact_int8:
        reader, pack = RowReader(reader), _without_contents(plan.packer())
    # Counts the weights for compiled kernels, too.
    llama = build_llama(reader, architecture, tables, pack, read)
    model = compiled or llama
    linears, size = read.linears, read.bytes
    if plan.by_transformers:
        linears, size = module_sizes(headers.saved, architecture, plan.dtype, plan.quantization, plan.quantized)
    return model, plan.info(linears, size, model), plan.attention


def _without_contents(pack: PackLinear) -> PackLinear:
    """Return a function that refuses what `pack` does; oneDNN's can't pack weights without contents."""
    if not isinstance(pack, OneDnnPacker):
        return pack

    def check(weight: LinearWeight) -> Linear:
        pack.check(weight)
        return float_linear(weight)

    return check
