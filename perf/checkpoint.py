"""The benchmarked checkpoint: a Llama of random weights, created on the spot, or the user's own; and its formats.

The cost of a pass depends on the shapes and not on the values, so random weights measure the same as trained ones and
need no download. Without a GPU it is a Llama of about 30 million parameters, large enough that computation and not
Python dominates and small enough for two cores; with one it has Llama-2-7B's shape. It has no end token: our server and
the baselines generate exactly as many tokens as they are asked for.

The tokenizer is the embedded checkpoint's. A larger vocabulary is filled with tokens that no text contains, so that
every generated token can be decoded.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from perf.environment import ROOT
from perf.roofline.rates import BYTES, Weights

EMBEDDED = ROOT / "models" / "pydoc-llama"
FOLDER = ROOT / ".work" / "bench"
"""Cache of the random ones."""
DTYPES: Mapping[Weights, str] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}
"""PyTorch's names of the formats."""
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
TINY_LLAMA = Shape(2048, 5632, 22, 32, 4, 32000, 2048, "bfloat16")
"""TinyLlama's: 1.1 billion parameters."""
LLAMA_2_7B = Shape(4096, 11008, 32, 32, 32, 32000, 4096, "float16")


def default_checkpoint() -> Path:
    """Return the checkpoint that is benchmarked by default, of the shape for this device; created unless it exists."""
    return random_checkpoint(LLAMA_2_7B if torch.cuda.is_available() else SMALL, FOLDER)


def random_checkpoint(shape: Shape, folder: Path) -> Path:
    """Return a checkpoint of that shape under `folder`, created there unless it exists."""
    digest = hashlib.sha256(json.dumps(asdict(shape)).encode()).hexdigest()[:8]
    target = folder / f"llama-{shape.hidden}x{shape.layers}-{digest}"
    if target.exists():
        return target
    _build(target, partial(_save, shape))
    return target


def w8a8(checkpoint: Path) -> Path:
    """Return the checkpoint in vLLM's INT8, in the form of compressed-tensors; created unless it exists.

    Weights have a scale per output channel; activations get one per token when they are computed. The head is floats.
    Its name has a digest of the config and of the weights' files' sizes and times: changed ones are converted again.
    """
    digest = hashlib.sha256((checkpoint / "config.json").read_bytes())
    for file in sorted(checkpoint.glob("*.safetensors")):
        found = file.stat()
        digest.update(f"{file.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    target = FOLDER / f"{checkpoint.resolve().name}-w8a8-{digest.hexdigest()[:8]}"
    if not target.exists():
        _build(target, partial(_save_w8a8, checkpoint))
    return target


def _build(target: Path, save: Callable[[Path], None]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # Under another name first: an interrupted write must not pass for a complete checkpoint.
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
    try:
        save(building)
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)


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


def unquantized() -> Weights:
    """Return the format of unquantized weights that the setting dtype=auto selects: FP16 on a GPU, FP32 on a CPU."""
    return "fp16" if torch.cuda.is_available() else "fp32"


def fastest() -> Weights:
    """Return the floats of baselines that use whatever the machine has: BF16 on a CPU whose flags have a product of it.

    The flags decide, no measurement: BF16 halves what a step reads and is multiplied by instructions of its own.
    """
    bf16 = {"amx_bf16", "avx512_bf16"} & set(Path("/proc/cpuinfo").read_text().split())
    return "bf16" if bf16 and not torch.cuda.is_available() else unquantized()


def mebibytes(checkpoint: Path, weights: Weights) -> float:
    """Return the memory of all weights of the checkpoint in that format of a baseline.

    INT8 is W8A8: the layers' matrices with an FP32 scale a row; embedding, head and norms are `fastest()`.
    """
    size = 0
    for name, parameter in _model(checkpoint).named_parameters():
        matrix = weights == "int8" and name.endswith("_proj.weight")
        kept = fastest() if weights == "int8" else weights
        size += parameter.numel() + 4 * len(parameter) if matrix else parameter.numel() * BYTES[kept]
    return size / 2**20


def described(checkpoint: Path) -> str:
    """Return the checkpoint in a few words."""
    random = ", random weights" if checkpoint.is_relative_to(FOLDER) else ""
    parameters = sum(parameter.numel() for parameter in _model(checkpoint).parameters())
    return f"Llama of {parameters / 1e6:,.1f} million parameters ({checkpoint.name}{random})"


def _model(checkpoint: Path) -> LlamaForCausalLM:
    """Return a model of the checkpoint's config, without values."""
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig.from_pretrained(checkpoint))


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


def _save_w8a8(checkpoint: Path, folder: Path) -> None:
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, folder / file.name)
    tensors: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            tensors[name] = tensor
            if name.endswith("_proj.weight"):
                scale = tensor.float().abs().amax(1, keepdim=True) / 127
                tensors[name] = (tensor.float() / scale).round().to(torch.int8)
                tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight_bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight_bits, "strategy": "token", "dynamic": True},
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
