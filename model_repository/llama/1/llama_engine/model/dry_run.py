"""Describes the model that loading a checkpoint would give, from its plan and the shapes in its headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from llama_engine.checkpoint.architecture import Architecture
from llama_engine.checkpoint.headers import CheckpointHeaders
from llama_engine.checkpoint.tensor_names import HEAD, SavedLinear, layer_linears, layer_norms, layer_prefix
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.model.builder import float_linear
from llama_engine.model.cpu_runner import packed_without_weights
from llama_engine.model.llama import Llama
from llama_engine.model.load_plan import LoadPlan, ModelParts, plan_load
from llama_engine.settings import Settings

_NF4_BLOCK = 64
"""Weights that share a scale in bitsandbytes' NF4. Saved scales can be smaller than these, in float32."""

_FUSED = {"query_key_value": 3, "gate_up": 2}
"""The number of linear layers in a field of `LayerWeights`; else 1."""


def describe_model(
    name: str, headers: CheckpointHeaders, settings: Settings, device: torch.device, max_model_len: int
) -> ModelParts:
    """Return a model without weights, the info of the loaded one, and its attention on a GPU.

    The kernels are tested as when a model is loaded. Raises CheckpointError as loading does, except for invalid
    contents of the weights.
    """
    plan = plan_load(name, headers, settings, device, max_model_len)
    architecture, tables = headers.architecture, plan.tables
    compiled = None
    if plan.kernels is not None:
        compiled = packed_without_weights(architecture, tables, plan.terms, plan.kernels)
    linears, size = _planned_weights(plan, architecture)
    nothing = torch.empty(0)
    model = compiled or Llama(architecture, nothing, [], nothing, float_linear(LinearWeight(nothing)), tables)
    return model, plan.info(linears, size, model), plan.attention


def _planned_weights(plan: LoadPlan, architecture: Architecture) -> tuple[Counter[str], int]:
    """Return the number of linear layers by weight dtype, and the bytes of all weights."""
    # Without the compiled kernels a CPU multiplies floats.
    served = "none" if plan.reads_int8 and plan.kernels is None and plan.device.type == "cpu" else plan.quantization
    linears: Counter[str] = Counter()
    shape, itemsize = (architecture.vocabulary, architecture.hidden), plan.dtype.itemsize
    size = itemsize * shape[0] * shape[1] if plan.kernels is None else plan.reader.packed_embedding_bytes
    gain = 4 if architecture.gain_offset else itemsize
    size += gain * (shape[1] + architecture.layers * sum(count for _, count in layer_norms(architecture).values()))
    for index in range(architecture.layers):
        for field, parts in layer_linears(architecture).items():
            named = [part.named(layer_prefix(index)) for part in parts]
            kind, count = _linear(plan, served, named)
            linears[kind] += _FUSED.get(field, 1)
            size += count
    in_floats = plan.by_transformers or plan.quantization == "none"
    kind, count = _linear(plan, "none" if in_floats else served, [SavedLinear(HEAD, shape)])
    linears[kind] += 1
    # A tied head in floats is the embedding.
    return linears, size if in_floats and architecture.tied else size + count


def _linear(plan: LoadPlan, quantization: str, parts: Sequence[SavedLinear]) -> tuple[str, int]:
    """Return weight dtype and bytes of the linear layer in which these are fused. quantization: the served one."""
    channels, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
    weights, biases = channels * columns, plan.dtype.itemsize * sum(part.shape[0] for part in parts if part.bias)
    if quantization == "none":
        return str(plan.dtype).removeprefix("torch."), weights * plan.dtype.itemsize + biases
    if quantization == "nf4":
        return "nf4", weights // 2 + 4 * weights // _NF4_BLOCK + biases
    quantized = plan.quantized
    formats = [quantized.groups(part) if quantized is not None and quantized.has(part) else None for part in parts]
    # A GPU's products take no groups of columns; these become INT8 per channel.
    groups = [group for group in formats if group is not None] if plan.kernels is not None else []
    if not groups:
        return "int8", weights + 4 * channels + biases
    # Parts that differ take the widest integers and the smallest groups among them.
    bits = max(8 if group is None else group.bits for group in formats)
    scales = 4 * weights // min(group.size for group in groups)
    offsets = scales if any(group.has_offsets for group in groups) else 0
    order = 8 * columns if any(group.has_order for group in groups) else 0
    return f"int{bits}", weights * bits // 8 + scales + offsets + order + biases
