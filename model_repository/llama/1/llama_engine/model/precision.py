"""Chooses device, quantization and dtypes for serving a checkpoint, from the settings and the saved precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from llama_engine.bounds import show
from llama_engine.checkpoint.formats.detection import FORMATS
from llama_engine.errors import CheckpointError
from llama_engine.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


_UNIFORM = ("none", "int8", "nf4")
"""The settings' formats that a checkpoint can be saved in: floats, and bitsandbytes'."""

_WIDE_RANGE_TYPES = ("gemma2", "gemma3_text")
"""Model types whose hidden states exceed float16's range."""


def quantization_config(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return the quantization config of a quantized checkpoint, else None."""
    saved = getattr(config, "quantization_config", None)
    return saved if saved is None or isinstance(saved, dict) else vars(saved)


def saved_quantization(config: PreTrainedConfig) -> str:
    """Return the saved quantization: none, int8, nf4 or another method's name."""
    values = quantization_config(config)
    if values is None:
        return "none"
    if values.get("load_in_8bit"):
        return "int8"
    return str(values.get("bnb_4bit_quant_type") if values.get("load_in_4bit") else values.get("quant_method"))


def choose_device(setting: str, gpu: int | None) -> torch.device:
    """Return the device to load on. gpu: index of the GPU that Triton assigned, None for a CPU instance.

    Raises CheckpointError if the setting requires a GPU and PyTorch finds none.
    """
    if setting == "cpu" or (setting == "auto" and gpu is None):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise CheckpointError(f"device is {setting!r} and Triton's instance is on {gpu=}, but PyTorch sees no GPU")
    # On Hopper and newer GPUs PyTorch prefers cuDNN's attention, which builds a plan per length in 0.1 to 0.5 s.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda", gpu or 0)


def choose_quantization(name: str, config: PreTrainedConfig, settings: Settings) -> tuple[str, float]:
    """Return the quantization to serve (none, int8 or nf4) and the outlier threshold of LLM.int8().

    The threshold is the setting's, whatever the checkpoint was saved with. int8 are the weights of any format that
    `formats` reads; under none a GGUF file is dequantized. Raises CheckpointError for another format, and if the
    checkpoint is saved in another quantization than the setting's.
    """
    method = saved_quantization(config)
    if method not in (*_UNIFORM, *FORMATS):
        raise CheckpointError(f"{name} is quantized with {show(method)}; this engine reads {', '.join(FORMATS)}")
    if method in FORMATS and settings.int8_threshold:
        raise CheckpointError(
            f"int8_threshold is {settings.int8_threshold:g}, but {name} is saved in {method}, which has no outlier "
            f"threshold; set it to 0"
        )
    if method == "gguf" and settings.quantization == "none":
        return "none", 0.0
    saved = "int8" if method in FORMATS else method
    if settings.quantization not in ("checkpoint", saved) and saved != "none":
        raise CheckpointError(
            f"quantization is {settings.quantization!r}, but {name} is saved in {method}; set quantization to "
            f"'checkpoint' to serve it as it is"
        )
    served = saved if settings.quantization == "checkpoint" else settings.quantization
    return served, settings.int8_threshold if served == "int8" else 0.0


def choose_dtype(name: str, model_type: str, setting: str, device: torch.device) -> torch.dtype:
    """Return the dtype of unquantized weights. Raises CheckpointError for float16 where a model exceeds its range."""
    wide = model_type in _WIDE_RANGE_TYPES
    if setting == "auto" and device.type == "cuda":
        return torch.bfloat16 if wide else torch.float16
    if setting == "float16" and wide:
        raise CheckpointError(
            f"dtype is 'float16', but the hidden states of {name}, a {model_type}, exceed its range; set it to auto, "
            f"bfloat16 or float32"
        )
    return torch.float32 if setting == "auto" else _torch_dtype(setting)


def choose_cache_dtype(setting: str, compiled: bool, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the KV cache. compiled: whether compiled kernels are used. dtype: that of the floats."""
    if setting == "auto":
        return torch.bfloat16 if compiled else dtype
    return _torch_dtype(setting)


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
