"""What loading a checkpoint would give, from its headers alone: `describe_model` instead of `products.load_model`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from llama_engine.model.architecture import Architecture
from llama_engine.model.builder import PackLinear, ReadWeights, build_llama, float_linear
from llama_engine.model.cpu_runner import compiled_without_weights
from llama_engine.model.llama import Linear
from llama_engine.model.model_info import BATCH, ModelInfo
from llama_engine.model.onednn_int8 import OneDnnPacker
from llama_engine.model.precision import choose_cache_dtype
from llama_engine.model.products import Choice, Loaded, choose, gpu_terms
from llama_engine.model.row_reader import RowReader
from llama_engine.model.saved_tensors import SavedTensors
from llama_engine.model.weight_sizes import HeaderReader, module_sizes
from llama_engine.model.weights import LinearWeight
from llama_engine.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def describe_model(
    name: str,
    saved: SavedTensors,
    config: PreTrainedConfig,
    architecture: Architecture,
    settings: Settings,
    device: torch.device,
    max_model_len: int,
) -> Loaded:
    """Return a model without weights, the info of the loaded one, and its attention on a GPU.

    Products are verified as when a model is loaded. Raises CheckpointError as `load_model` does.
    """
    chosen = choose(name, saved, config, architecture, settings, device, max_model_len)
    int8 = chosen.quantization == "int8" and not chosen.by_transformers
    reader, read = HeaderReader(architecture, chosen.dtype, chosen.quantized, int8), ReadWeights()
    compiled = None
    if int8 and device.type == "cpu" and settings.kernels != "stock":
        cache_dtype = choose_cache_dtype(settings.kv_cache_dtype, compiled=True, dtype=torch.float32)
        compiled = compiled_without_weights(architecture, chosen.tables, chosen.terms, cache_dtype)
    pack: PackLinear = float_linear
    product, bits_depend_on = "", BATCH
    if compiled is not None:
        product, bits_depend_on = compiled.describe(), ""
    elif int8:
        pack, product, bits_depend_on = _checked_product(chosen, device)
    rows = reader if compiled is not None or not int8 else RowReader(reader)
    model = build_llama(rows, architecture, chosen.tables, pack, read)
    linears, size = dict(read.linears), read.bytes
    if chosen.by_transformers:
        linears, size = module_sizes(saved, architecture, chosen.dtype, chosen.quantization, chosen.quantized)
    info = ModelInfo(linears, size, chosen.dtype, device, chosen.threshold, product, bits_depend_on)
    return compiled or model, info, chosen.attention


def _checked_product(chosen: Choice, device: torch.device) -> tuple[PackLinear, str, str]:
    """Return a function that checks whether a layer's shape has an exact product, its name and what bits depend on."""
    if device.type == "cpu":
        packer = OneDnnPacker(chosen.terms)

        def check(weight: LinearWeight) -> Linear:
            packer.check(weight)
            return float_linear(weight)

        return check, packer.describe(), "" if chosen.dtype == torch.float32 else BATCH
    # Imported here because importing bitsandbytes takes 2 s.
    from llama_engine.kernels.gpu.exact_int8 import exact_int8_linear

    def check_on_gpu(weight: LinearWeight) -> Linear:
        rows = LinearWeight(weight.weight, weight.weight.new_empty(len(weight.weight)))
        return exact_int8_linear(rows, gpu_terms(chosen.terms), chosen.elementwise)

    return check_on_gpu, f"exact INT8, {chosen.terms.describe()}, bitsandbytes", BATCH
