"""A LoRA adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors.

The file has exactly the tensors that PEFT makes for the layers of the config, in the shapes of the base, and all
numbers are finite; anything else is refused by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from llama_engine.bounds import show
from llama_engine.checkpoint.architecture import Architecture
from llama_engine.checkpoint.json_files import file_error
from llama_engine.checkpoint.lora_config import CONFIG, LoraShape, max_file_bytes, read_lora_config
from llama_engine.checkpoint.safetensors_header import TensorHeader, read_header
from llama_engine.checkpoint.tensor_names import SavedLinear, all_linears, layer_prefix
from llama_engine.checkpoint.tensors import read_bytes

ADAPTER = "adapter_model.safetensors"

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class LoraWeights:
    """What an adapter adds to a linear layer: y += scaling · (x·Aᵀ)·Bᵀ.

    a: [rank, in]. b: [out, rank]. Both are float32 or both bfloat16 (float16 and mixed dtypes become float32),
    contiguous and finite.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter of a base model.

    digest: SHA-256 of the scalings and of the tensors' names, dtypes, shapes and bytes. rank: the largest one.
    layers: for each decoder layer, the weights by the name of the `SavedLinear`, such as self_attn.q_proj.
    """

    digest: str
    rank: int
    layers: tuple[Mapping[str, LoraWeights], ...]


def read_adapter(folder: Path, architecture: Architecture, max_rank: int) -> LoraAdapter:
    """Return the adapter in a folder. architecture: the base's. max_rank: the setting max_lora_rank.

    Raises CheckpointError with one line that names the file, the field or the tensor, its value and the bound.
    """
    for name in (CONFIG, ADAPTER):
        # Reading a pipe or a device waits or does not end.
        if not (folder / name).is_file():
            advice = "; adapter_model.bin is a pickle, which can run code: save the adapter as safetensors with PEFT"
            bin_only = name == ADAPTER and (folder / "adapter_model.bin").exists()
            raise file_error(folder / name, f"there is no such file{advice if bin_only else ''}")
    linears = {linear.name: linear for linear in all_linears(architecture)}
    path = folder / ADAPTER
    shapes = read_lora_config(folder / CONFIG, [*linears], max_rank)
    headers = read_header(path, max_file_bytes(len(linears)))
    _check_headers(path, headers, {name: (linears[name], shape) for name, shape in shapes.items()})
    digest = hashlib.sha256()
    layers: list[dict[str, LoraWeights]] = []
    for index in range(architecture.layers):
        prefix, weights = layer_prefix(index), dict[str, LoraWeights]()
        for name, shape in shapes.items():
            if name.startswith(prefix):
                digest.update(f"{name} {shape} ".encode())
                a, b = (_read(path, headers, _tensor_name(name, side), digest) for side in ("A", "B"))
                if a.dtype != b.dtype:
                    a, b = a.float(), b.float()
                weights[name.removeprefix(prefix)] = LoraWeights(a, b, shape.scaling)
        layers.append(weights)
    return LoraAdapter(digest.hexdigest(), max(shape.rank for shape in shapes.values()), tuple(layers))


def _tensor_name(linear: str, side: Literal["A", "B"]) -> str:
    return f"base_model.model.{linear}.lora_{side}.weight"


def _check_headers(
    path: Path, headers: Mapping[str, TensorHeader], targets: Mapping[str, tuple[SavedLinear, LoraShape]]
) -> None:
    """Check that a file has exactly the tensors of the targeted layers, in their shapes. Raises CheckpointError."""
    expected: dict[str, tuple[int, int]] = {}
    for name, (linear, shape) in targets.items():
        (rows, columns), rank = linear.shape, shape.rank
        expected |= {_tensor_name(name, "A"): (rank, columns), _tensor_name(name, "B"): (rows, rank)}
    for name, header in headers.items():
        if name not in expected:
            raise file_error(path, f"it has {show(name)}, which is no tensor of a layer in target_modules of this base")
        if header.shape != expected[name]:
            raise file_error(path, f"{name} is {show(header.shape)}; base and rank need {expected[name]}")
        if header.dtype not in _DTYPES:
            raise file_error(path, f"{name} is {show(header.dtype)}; it must be one of {', '.join(_DTYPES)}")
    if missing := next((name for name in expected if name not in headers), None):
        raise file_error(path, f"it has no {missing}, which target_modules needs")


def _read(path: Path, headers: Mapping[str, TensorHeader], name: str, digest: hashlib._Hash) -> torch.Tensor:
    """Return a tensor, float16 as float32, and add it to the digest. Raises CheckpointError if it isn't finite."""
    header = headers[name]
    tensor = torch.empty(header.shape, dtype=_DTYPES[header.dtype])
    try:
        read_bytes(path, header.begin, tensor, name)
    except OSError as error:
        raise file_error(path, str(error.strerror)) from error
    if not tensor.isfinite().all():
        raise file_error(path, f"{name} has numbers that are not finite")
    digest.update(f"{name} {header.dtype} {header.shape} ".encode())
    digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return tensor.float() if tensor.dtype == torch.float16 else tensor
