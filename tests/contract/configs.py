"""The model's configs, read with Triton's own protobuf."""

from __future__ import annotations

from contract.code_blocks import ROOT
from google.protobuf import text_format  # type: ignore[import-untyped]  # ships no annotations
from tritonclient.grpc.model_config_pb2 import ModelConfig

MODEL = ROOT / "model_repository" / "llama"
FILES = {path.stem: path for path in (MODEL / "config.pbtxt", *sorted(MODEL.glob("configs/*")))}


def read_config(name: str) -> ModelConfig:
    """Return the config of this name: `config` is the default one."""
    config = ModelConfig()
    text_format.Parse(FILES[name].read_text(), config)
    return config
