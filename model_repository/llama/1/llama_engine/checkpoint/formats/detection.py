"""Finds the format of a checkpoint's quantized linear layers from its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llama_engine.checkpoint.formats.awq import Awq
from llama_engine.checkpoint.formats.bitsandbytes_int8 import BitsandbytesInt8
from llama_engine.checkpoint.formats.compressed_tensors import CompressedTensors
from llama_engine.checkpoint.formats.fp8 import fp8
from llama_engine.checkpoint.formats.gguf import GgufBlocks
from llama_engine.checkpoint.formats.gptq import Gptq
from llama_engine.checkpoint.formats.linear_format import LinearFormat
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.errors import CheckpointError

FORMATS: Mapping[str, Callable[[SavedTensors, Mapping[str, Any]], LinearFormat]] = {
    "bitsandbytes": lambda saved, _: BitsandbytesInt8(saved),
    "compressed-tensors": CompressedTensors,
    "gptq": Gptq,
    "awq": Awq,
    "fp8": fp8,
    "fbgemm_fp8": fp8,
    "gguf": lambda saved, _: GgufBlocks(saved),
}
"""The formats that `WeightReader` reads, by the `quant_method` of config.json's `quantization_config`.

Each takes the saved tensors and the quantization config, and raises CheckpointError, naming the field, for a variant
that isn't supported.
"""


def linear_format(saved: SavedTensors, quantization: Mapping[str, Any] | None) -> LinearFormat | None:
    """Return the format of the quantized linear layers, None for a checkpoint in floats.

    quantization: config.json's `quantization_config`. Raises CheckpointError for a format that isn't supported.
    """
    if quantization is None:
        return None
    method = quantization.get("quant_method", "bitsandbytes")
    if method not in FORMATS:
        raise CheckpointError(f"{saved.source} is quantized with {method!r}; this engine reads {', '.join(FORMATS)}")
    return FORMATS[method](saved, quantization)
