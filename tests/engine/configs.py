"""The model's configs, read with Triton's own protobuf."""

from pathlib import Path

from google.protobuf import text_format  # type: ignore[import-untyped]  # ships no annotations
from tritonclient.grpc.model_config_pb2 import ModelConfig

MODEL = Path(__file__).resolve().parents[2] / "model_repository" / "llama"
FILES = {path.stem: path for path in (MODEL / "config.pbtxt", *sorted(MODEL.glob("configs/*")))}


def parsed(path: Path) -> ModelConfig:
    """Return a config.pbtxt."""
    config = ModelConfig()
    text_format.Parse(path.read_text(), config)
    return config


def read_config(name: str) -> ModelConfig:
    """Return llama's config of this name: `config` is the default one."""
    return parsed(FILES[name])
