"""A checkpoint's headers, which are read before its weights: its config, and the headers of its tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llama_engine.checkpoint.architecture import Architecture, read_architecture
from llama_engine.checkpoint.config import read_config
from llama_engine.checkpoint.config_bounds import check_heads, check_values
from llama_engine.checkpoint.files import check_files
from llama_engine.checkpoint.gguf.config import read_gguf_config
from llama_engine.checkpoint.gguf.header import GgufFile, find_gguf, read_gguf
from llama_engine.checkpoint.gguf.tensors import GgufTensors
from llama_engine.checkpoint.gguf.tokenizer import read_gguf_tokenizer
from llama_engine.checkpoint.tensors import SavedTensors
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
        return self.saved.folder if self.gguf is None else self.gguf.path.parent

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
        config = read_config(folder, name)
        return CheckpointHeaders(config, read_architecture(config, name), SavedTensors(folder), None)
    file = read_gguf(gguf)
    config = read_gguf_config(file)
    check_values(config.to_dict(), f"{name}: its metadata")
    check_heads(config, f"{name}: its metadata")
    # GGUF saves norms with Gemma's 1 added.
    architecture = replace(read_architecture(config, name), gain_offset=0.0)
    return CheckpointHeaders(config, architecture, GgufTensors(file, architecture), file)
