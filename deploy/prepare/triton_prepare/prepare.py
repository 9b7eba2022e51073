"""Quantize a checkpoint in floats to INT8 once, as a server does at every start; copy one that is quantized already.

A GGUF file is dequantized, and its weights are quantized as those of any checkpoint in floats. A LoRA adapter can be
merged into the weights before they are quantized.

The result is complete or absent: it is written into a folder beside OUT, loaded once, and renamed.
"""

import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import llama_engine.libraries  # noqa: F401 - before anything that imports torch
import torch
from llama_engine.bounds import show
from llama_engine.checkpoint.architecture import read_architecture
from llama_engine.checkpoint.files import INDEX, WEIGHTS, weight_files
from llama_engine.checkpoint.headers import CheckpointHeaders, read_checkpoint_headers
from llama_engine.checkpoint.hub import LICENCES, SMALL_FILES, resolve_adapter, resolve_folder
from llama_engine.checkpoint.lora import LoraAdapter, LoraWeights, read_adapter
from llama_engine.checkpoint.lora_config import MAX_RANK
from llama_engine.checkpoint.per_channel import for_each_block, quantize_per_channel, row_blocks
from llama_engine.checkpoint.tensor_names import SavedLinear, all_linears, layer_prefix
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.checkpoint.weight_reader import WeightReader
from llama_engine.errors import CheckpointError, one_line
from llama_engine.model.loader import load_checkpoint, loading, resolve_name
from llama_engine.model.precision import quantization_config
from llama_engine.settings import Settings
from safetensors.torch import save_file

SHARD_BYTES = 4 << 30
"""Maximum bytes of the saved tensors whose quantized ones are in one file; as much is in memory at once."""

_QUANTIZATION = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 0.0}


def prepare(
    model: str, revision: str | None, out: Path, shard_bytes: int = SHARD_BYTES, adapter: str | None = None
) -> None:
    """Write a checkpoint (folder, GGUF file or hub id) to `out`: quantized to INT8, or copied if it is quantized.

    Tensors that aren't quantized keep their saved dtype, and the server converts them. adapter: folder or hub id of a
    LoRA adapter to merge. Raises CheckpointError as the server does, if `out` exists, or for an adapter of a quantized
    checkpoint.
    """
    out = out.expanduser().resolve()
    if out.exists():
        raise CheckpointError(f"{out} exists; remove it, or name another folder")
    name = resolve_name(model)
    refuse_revision(name, revision)
    with loading(name):
        headers = read_checkpoint_headers(resolve_folder(name, revision, sys.stderr.isatty()), name)
        quantized = headers.gguf is None and quantization_config(headers.config) is not None
        if not quantized:
            # Checks shapes and dtypes before anything is written.
            WeightReader(headers.saved, headers.architecture, torch.float32, int8=True)
        if quantized and adapter is not None:
            raise CheckpointError(f"adapter is {show(adapter)}, but {name} is quantized; floats are needed to merge it")
        lora = None if adapter is None else read_adapter(resolve_adapter(adapter), headers.architecture, MAX_RANK)
        tokenizer = headers.read_tokenizer()
    part = out.with_name(f"{out.name}.{secrets.token_hex(4)}")
    part.mkdir(parents=True)
    try:
        merging = "" if adapter is None else f" with {adapter} merged"
        print(f"prepare: {'copying' if quantized else 'quantizing'} {name}{merging}", flush=True)
        if headers.gguf is None:
            _copy(headers.folder, part, SMALL_FILES, with_weights=quantized)
        else:
            _copy(headers.folder, part, LICENCES, with_weights=False)
            headers.config.save_pretrained(part)
            tokenizer.pretrained.save_pretrained(part)
        if not quantized:
            # GGUF saves norms with Gemma's 1 added.
            offset = read_architecture(headers.config, name).gain_offset - headers.architecture.gain_offset
            _quantize(headers, part, shard_bytes, offset, lora)
        print("prepare: loading the result", flush=True)
        # Pooling doesn't change the weights, and the files' may not be served. A base model doesn't load without any.
        pooling = "off" if headers.architecture.has_head else "last"
        load_checkpoint(Settings(model=str(part), quantization="checkpoint", pooling=pooling), torch.device("cpu"))
        _flush(part)
        part.rename(out)
        _sync(out.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f"prepare: {out}: {sum(path.stat().st_size for path in out.iterdir()) / 1e9:.2f} GB", flush=True)


def refuse_revision(name: str, revision: str | None) -> None:
    """Raise CheckpointError for a revision of what is on this machine."""
    if revision and Path(name).exists():
        raise CheckpointError(f"revision is {show(revision)}, but {name} is no hub id; only a hub id has revisions")


def _copy(folder: Path, out: Path, patterns: Sequence[str], with_weights: bool) -> None:
    """Copy the files of these patterns, such as configs, tokenizer and licence, and the weights with their index."""
    weights = {path.name for path in weight_files(folder)} if with_weights else set()
    for path in (*folder.iterdir(), *folder.glob("*/*")):
        name = str(path.relative_to(folder))
        small = any(fnmatch(name, pattern) for pattern in patterns) and (with_weights or name != INDEX)
        if path.is_file() and (small or name in weights):
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, out / name)


def _quantize(
    headers: CheckpointHeaders, out: Path, shard_bytes: int, offset: float, adapter: LoraAdapter | None
) -> None:
    """Write the weights in files, their index if there are several, and the config.

    offset: what is added to the gains of norms in the files that are read, and not in those of a folder. adapter: to
    be merged.
    """
    saved, linears = headers.saved, {f"{linear.name}.weight": linear for linear in all_linears(headers.architecture)}
    loras = {
        f"{layer_prefix(index)}{name}.weight": weights
        for index, layer in enumerate(adapter.layers if adapter else ())
        for name, weights in layer.items()
    }
    shards = list(_shards(saved, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            if name in linears:
                tensors |= _int8_per_channel(saved, linears[name], loras.get(name))
            else:
                tensors[name] = (
                    saved.read(name) - offset if offset and name.endswith("norm.weight") else saved.read(name)
                )
        try:
            save_file(tensors, out / file, {"format": "pt"})
        except Exception as error:
            # safetensors reports a full disk in an error class of its own.
            raise CheckpointError(f"{out / file} can't be written: {one_line(error)}") from error
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))
    config = json.loads((out / "config.json").read_bytes())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": _QUANTIZATION}, indent=2) + "\n")


def _shards(saved: SavedTensors, shard_bytes: int) -> Iterator[list[str]]:
    """Yield the tensors' names in the order of the files, of at most `shard_bytes` or one tensor."""
    names: list[str] = []
    size = 0
    for name, tensor in saved.items():
        count = tensor.end - tensor.begin
        if names and size + count > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += count
    yield names


def _int8_per_channel(saved: SavedTensors, linear: SavedLinear, lora: LoraWeights | None) -> dict[str, torch.Tensor]:
    """Return a linear layer in bitsandbytes' format: INT8 rows, the largest magnitude of each, and their layout.

    lora: merged in float32 and rounded once to the saved dtype; PEFT rounds the product of B and A, too.
    """
    name = f"{linear.name}.weight"
    weight, largest = torch.empty(linear.shape, dtype=torch.int8), torch.empty(linear.shape[0])

    def quantize(rows: slice) -> None:
        # By way of float16, as `WeightReader` does for a server.
        block = saved.read(name, rows)
        if lora is not None:
            block = (block.float() + lora.scaling * (lora.b[rows].float() @ lora.a.float())).to(block.dtype)
        block = block.float().half()
        weight[rows], _ = quantize_per_channel(block)
        largest[rows] = block.abs().amax(dim=1).float()

    for_each_block(row_blocks(*linear.shape), quantize)
    layout = torch.tensor(0, dtype=torch.uint8)
    return {name: weight, f"{linear.name}.SCB": largest, f"{linear.name}.weight_format": layout}


def _flush(folder: Path) -> None:
    """Write the files through to the volume, readable as the umask allows: safetensors creates them for their owner."""
    mode = (folder / "config.json").stat().st_mode
    for path in (*folder.rglob("*"), folder):
        if path.is_file():
            path.chmod(mode)
        _sync(path)


def _sync(path: Path) -> None:
    """Write a file, or the entries of a folder, through to the volume."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
