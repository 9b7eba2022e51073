"""The model's configs, read with Triton's own protobuf, and the inputs and outputs of the contract with clients."""

from __future__ import annotations

from contract.code_blocks import ROOT
from google.protobuf import text_format  # type: ignore[import-untyped]  # ships no annotations
from tritonclient.grpc.model_config_pb2 import (
    TYPE_BOOL,
    TYPE_FP32,
    TYPE_INT32,
    TYPE_STRING,
    TYPE_UINT64,
    ModelConfig,
)

MODEL = ROOT / "model_repository" / "llama"
FILES = {path.stem: path for path in (MODEL / "config.pbtxt", *sorted(MODEL.glob("configs/*")))}

INPUTS = {
    "text_input": (TYPE_STRING, [1]),
    "max_tokens": (TYPE_INT32, [1]),
    "min_tokens": (TYPE_INT32, [1]),
    "temperature": (TYPE_FP32, [1]),
    "top_k": (TYPE_INT32, [1]),
    "top_p": (TYPE_FP32, [1]),
    "repetition_penalty": (TYPE_FP32, [1]),
    "frequency_penalty": (TYPE_FP32, [1]),
    "presence_penalty": (TYPE_FP32, [1]),
    "seed": (TYPE_UINT64, [1]),
    "stop_words": (TYPE_STRING, [-1]),
    "bad_words": (TYPE_STRING, [-1]),
    "stream": (TYPE_BOOL, [1]),
    "exclude_input_in_output": (TYPE_BOOL, [1]),
    "return_finish_reason": (TYPE_BOOL, [1]),
    "return_num_input_tokens": (TYPE_BOOL, [1]),
    "return_num_output_tokens": (TYPE_BOOL, [1]),
}
OUTPUTS = {
    "text_output": (TYPE_STRING, [1]),
    "finish_reason": (TYPE_STRING, [1]),
    "num_input_tokens": (TYPE_INT32, [1]),
    "num_output_tokens": (TYPE_INT32, [1]),
}


def read_config(name: str) -> ModelConfig:
    """Return the config of this name: `config` is the default one."""
    config = ModelConfig()
    text_format.Parse(FILES[name].read_text(), config)
    return config
