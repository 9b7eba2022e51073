"""The slot for the engine's own kernels: a product with 8-bit weights and a decode attention, where it has them.

Everything that a benchmark has to know of them is in here: `llama_engine.kernels` chooses them as a checkpoint is
loaded, `llama_engine.int8_kernel` has the ways to cut a weight, `llama_engine.plain_kernels` the same product unfused.
An engine without these modules has no kernels of its own, which is no error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec

import torch
from bitsandbytes.nn.modules import Linear8bitLt
from transformers import LlamaForCausalLM

Product = Callable[[torch.Tensor], torch.Tensor]

CHOICE, KERNEL, PLAIN = "llama_engine.kernels", "llama_engine.int8_kernel", "llama_engine.plain_kernels"
LAYERS = "llama_engine.int8_linear"

_OUTPUTS, _INNER, _STAGES, _SPLITS = (32, 64, 128), (64, 128, 256), (3, 5), (1, 2, 4)
_SHARED_MEMORY = 200 << 10


class NoKernelError(Exception):
    """There is no fused product here; `str()` says why."""


def as_served(model: LlamaForCausalLM, threshold: float | None) -> Mapping[str, object]:
    """Make of a model what loading a checkpoint would; return what a Checkpoint holds of it besides the usual.

    threshold: of its 8-bit layers; None where it has none.
    """
    for module in model.modules():
        if isinstance(module, Linear8bitLt) and module.weight.SCB is None:
            # At its first use a layer takes weight and scales to itself; whoever takes over looks for them here.
            module.weight.CB, module.weight.SCB = module.state.CB, module.state.SCB
    device, config, unrounded = model.device, model.config, threshold == 0
    # As Any: this engine's layers may take kernels or know of none.
    layers = import_module(LAYERS)
    if find_spec(CHOICE) is None:
        if unrounded and device.type == "cpu":
            layers.leave_activations_unrounded(model)
        return {}
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    group = config.num_attention_heads // (config.num_key_value_heads or config.num_attention_heads)
    kernels = import_module(CHOICE).choose_kernels(device, model.dtype, head_dim, group, eight_bit=unrounded)
    if unrounded:
        layers.leave_activations_unrounded(model, None if device.type == "cpu" else kernels)
    return {"kernels": kernels}


def product(codes: torch.Tensor, scales: torch.Tensor) -> Product:
    """Return y = x (codes · scales)ᵀ by the engine's kernel. Raises NoKernelError, or what importing it raises.

    codes: [outputs, inputs], int8. scales: [outputs], float32, what a code of 1 is worth.
    """
    kernel = _function(KERNEL, codes.device)
    return lambda rows: kernel(rows, codes, scales, None)


def plain_product(codes: torch.Tensor, scales: torch.Tensor) -> Product:
    """Return the same as the engine computes it for many rows: widened as a whole, then multiplied. Raises alike."""
    plain = _function(PLAIN, codes.device)
    return lambda rows: plain(rows, codes, scales, None)


def variants(codes: torch.Tensor, scales: torch.Tensor) -> Mapping[str, Product]:
    """Return the fused product with the weight cut in many ways, by what they are. Raises as `product` does."""
    kernel = _function(KERNEL, codes.device)
    tiles = import_module(KERNEL).Tiles

    def cut(outputs: int, inner: int, stages: int, splits: int) -> Product:
        way = tiles(outputs=outputs, inner=inner, stages=stages, splits=splits)
        return lambda rows: kernel(rows, codes, scales, None, way)

    return {
        f"outputs {outputs}, inner {inner}, stages {stages}, splits {splits}": cut(outputs, inner, stages, splits)
        for outputs, inner, stages, splits in itertools.product(_OUTPUTS, _INNER, _STAGES, _SPLITS)
        # A block of the weight and one of 32 rows in 16 bits, so many times; what doesn't fit isn't worth compiling.
        if stages * inner * (outputs + 2 * 32) <= _SHARED_MEMORY
    }


def _function(module: str, device: torch.device) -> Callable[..., torch.Tensor]:
    if device.type != "cuda":
        raise NoKernelError("needs CUDA")
    if find_spec(module) is None:
        raise NoKernelError(f"this engine has no {module}")
    found: Callable[..., torch.Tensor] = import_module(module).int8_product
    return found
