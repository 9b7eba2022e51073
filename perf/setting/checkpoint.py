"""The checkpoint that is benchmarked: a Llama of random weights, made on the spot, or the user's own.

What a pass costs depends on the shapes and not on the values, so random weights measure the same as trained ones and
need no download. Without a GPU it is a Llama of about 30 million parameters, large enough that computation and not
Python dominates and small enough for two cores; with one it has Llama-2-7B's shape. It has no end token: every server,
ours and the peers', generates exactly as many tokens as it is asked for.

The tokenizer is the embedded checkpoint's. Where the shape has more tokens than it knows, tokens that no text contains
fill the rest, so that whatever is generated can be turned into text.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from perf.setting.machine import ROOT

EMBEDDED = ROOT / "models" / "pydoc-llama"
FOLDER = ROOT / ".work" / "bench"
"""Where the random ones are kept."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Shape:
    """A Llama's shape. vocabulary: at least the embedded tokenizer's 3,072 tokens. dtype: of the saved weights."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    positions: int
    dtype: str


SMALL = Shape(512, 1536, 8, 8, 8, 3072, 1024, "float32")
"""30.4 million parameters, 29 million of them in the layers' matrices and the head."""
LLAMA_2_7B = Shape(4096, 11008, 32, 32, 32, 32000, 4096, "float16")


def default_checkpoint() -> Path:
    """Return the one that is benchmarked where no other is named, made now if need be."""
    return random_checkpoint(default_shape(), FOLDER)


def default_shape() -> Shape:
    """Return the shape for the device at hand."""
    return LLAMA_2_7B if torch.cuda.is_available() else SMALL


def random_checkpoint(shape: Shape, folder: Path) -> Path:
    """Return a checkpoint of that shape under `folder`, made there unless it is there already."""
    digest = hashlib.sha256(json.dumps(asdict(shape)).encode()).hexdigest()[:8]
    target = folder / f"llama-{shape.hidden}x{shape.layers}-{digest}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    # Under another name first: an interrupted one must not be taken for a whole one.
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=folder))
    try:
        _save(shape, building)
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def config_of(shape: Shape) -> LlamaConfig:
    """Return the model's config: no end token, and the embedded tokenizer's beginning."""
    return LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.positions,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
        dtype=getattr(torch, shape.dtype),
    )


def _save(shape: Shape, folder: Path) -> None:
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config_of(shape)).to(getattr(torch, shape.dtype))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(EMBEDDED / name, folder / name)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for token in range(len(vocabulary), shape.vocabulary):
        # No merge leads to them, so no text is ever split into them.
        vocabulary[f"<unused{token}>"] = token
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
