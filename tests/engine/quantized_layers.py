"""One linear layer in the formats of other quantizers, as a checkpoint saves it and as the weight reader reads it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from llama_engine.checkpoint.formats.detection import linear_format
from llama_engine.checkpoint.tensor_names import SavedLinear
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.checkpoint.weights import LinearWeight
from safetensors.torch import save_file

from models.quantized_checkpoints import Quantized, Tensors, quantize

NAME = "model.layers.0.mlp.down_proj"
OUTPUTS, INPUTS = 72, 384
WEIGHT = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0)) + 0.1
SHUFFLED = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1))
"""The inputs in an order of the activations."""

Config = dict[str, Any]


def gptq_config(bits: int = 4, size: int = 128, **changed: object) -> Config:
    return {"quant_method": "gptq", "bits": bits, "group_size": size, **changed}


def awq_config(size: int = 128, **changed: object) -> Config:
    return {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True, **changed}


def compressed(weights: Mapping[str, object] | None = None, **changed: object) -> Config:
    """A config of compressed-tensors whose weights have these options."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", **(weights or {})}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **changed}


def in_groups(bits: int, size: int) -> Config:
    return compressed({"num_bits": bits, "group_size": size, "strategy": "group"}, format="pack-quantized")


def saved_in(folder: Path, tensors: Tensors) -> SavedTensors:
    named = {f"{NAME}.{key}": tensor.contiguous() for key, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    return SavedTensors(folder)


def read(folder: Path, tensors: Tensors, config: Config, shape: tuple[int, int] = (OUTPUTS, INPUTS)) -> LinearWeight:
    """Check the layer's tensors as the weight reader does, and read it."""
    saved, linear = saved_in(folder, tensors), SavedLinear(NAME, shape)
    quantized = linear_format(saved, config)
    assert quantized is not None
    assert quantized.has(linear)
    expected = quantized.tensors(linear)
    assert expected.keys() == saved.keys()
    for name, tensor in expected.items():
        assert saved[name].shape == tensor.shape
        assert saved[name].dtype in tensor.dtypes
    return quantized.read(linear)


def rounded(
    bits: int, groups: int | torch.Tensor = -1, sym: bool = True, dtype: torch.dtype = torch.float16
) -> Quantized:
    """Return WEIGHT in groups of that many columns, -1 for all, or in those of each column."""
    return quantize(WEIGHT, bits, INPUTS if isinstance(groups, int) and groups == -1 else groups, sym, dtype)


def by_act_order(size: int) -> torch.Tensor:
    return (torch.arange(INPUTS) // size)[SHUFFLED]


FP8: Config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
