"""A checkpoint's headers, which are read before its weights: its config, and the headers of its tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llama_engine.bounds import show
from llama_engine.checkpoint.architecture import Architecture, read_architecture
from llama_engine.checkpoint.config import read_config
from llama_engine.checkpoint.config_bounds import check_heads, check_values
from llama_engine.checkpoint.files import MODULES, check_files
from llama_engine.checkpoint.gguf.config import read_gguf_config
from llama_engine.checkpoint.gguf.header import GgufFile, find_gguf, read_gguf
from llama_engine.checkpoint.gguf.tensors import GgufTensors
from llama_engine.checkpoint.gguf.tokenizer import read_gguf_tokenizer
from llama_engine.checkpoint.tensor_names import HEAD
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.errors import CheckpointError
from llama_engine.text.tokenizer import Tokenizer, read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class CheckpointHeaders(NamedTuple):
    """A checkpoint's config, and its tensors without contents. gguf: its GGUF file, None for safetensors."""

    config: PreTrainedConfig
    architecture: Architecture
    saved: SavedTensors
    gguf: GgufFile | None

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint's files."""
        return self.saved.source if self.gguf is None else self.gguf.path.parent

    def read_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the folder, or of the GGUF file. Raises CheckpointError."""
        if self.gguf is None:
            return read_tokenizer(self.folder, self.config)
        return read_gguf_tokenizer(self.gguf, self.config)


def read_checkpoint_headers(folder: Path, name: str) -> CheckpointHeaders:
    """Check the files in a folder, or a GGUF file, and read their headers. Raises CheckpointError."""
    check_files(folder)
    gguf = find_gguf(folder)
    if gguf is None:
        config, saved = read_config(folder, name), SavedTensors(folder)
        # A base model's embedding stands in for the head that it lacks.
        is_base = _is_base_model(config, saved, name)
        config.tie_word_embeddings |= is_base
        architecture = replace(read_architecture(config, name), has_head=not is_base)
        return CheckpointHeaders(config, architecture, saved, None)
    file = read_gguf(gguf)
    config = read_gguf_config(file)
    check_values(config.to_dict(), f"{name}: its metadata")
    check_heads(config, f"{name}: its metadata")
    # GGUF saves norms with Gemma's 1 added.
    architecture = replace(read_architecture(config, name), gain_offset=0.0)
    return CheckpointHeaders(config, architecture, GgufTensors(file, architecture), file)


def _is_base_model(config: PreTrainedConfig, saved: SavedTensors, name: str) -> bool:
    """Return whether a checkpoint has no output head on purpose: it was saved for sentence-transformers, or by itself.

    Qwen3-Embedding's config names the class with a head, whose weights the larger ones lack. Raises CheckpointError for
    another base class than transformers' own of the model type: its attention may be bidirectional.
    """
    names, base = config.architectures or [], f"{config.model_type.replace('_', '')}model"
    for other in names:
        if other.endswith("Model") and other.lower() != base:
            served = f"of base models it serves transformers' own of {config.model_type}"
            raise CheckpointError(f"{name}: architectures has {show(other)}, which this engine doesn't know; {served}")
    if config.tie_word_embeddings or any(tensor.startswith(f"{HEAD}.") for tensor in saved):
        return False
    if (saved.source / MODULES).exists():
        return all(other.endswith(("Model", "ForCausalLM")) for other in names)
    return bool(names) and all(other.endswith("Model") for other in names)
