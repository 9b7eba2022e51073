"""Write a float checkpoint again in a quantized format that people have on disk: for tests and benchmarks.

Weights of the layers' linears are rounded to nearest, without calibration: another quantizer has other values in the
same layout. Embedding, norms and head stay floats. Each layout is its library's, which reads what is written here:

- w8a8, w8a16, w4a16, fp8-…: compressed-tensors 0.19 ("int-quantized", "pack-quantized", "float-quantized"), as
  llm-compressor 0.14 writes them: for BF16 checkpoints the same bytes. Per-tensor FP8 has dynamic activations here.
- gptq…: AutoGPTQ 0.7.1 (`QuantLinear.pack`), version 1: stored zero points are one less than what they mean. With
  act-order a column's group is in `g_idx`; linears of the same input have the same order, here a random one.
- awq4: AutoAWQ 0.2.9 (`WQLinear_GEMM.from_linear`).
- fp8: `weight_scale_inv` per block of 128 × 128, as DeepSeek-V3 and Qwen3 publish it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

GROUP = 128
"""Columns of a group, and rows and columns of a block."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_MIN_SCALE = 1e-5
"""Of rows and groups that are zero."""

Tensors = dict[str, torch.Tensor]


class Format(NamedTuple):
    """write: from a linear's name and weight [out, in] to its tensors. config: `quantization_config`.

    dtype: of the other tensors; None keeps the source's.
    """

    write: Callable[[str, torch.Tensor], Tensors]
    config: Mapping[str, object]
    dtype: torch.dtype | None = None


def write(source: Path, name: str, target: Path) -> Path:
    """Write the checkpoint in the folder `source` in that format of FORMATS into the folder `target`; return it."""
    chosen = FORMATS[name]
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith("model"):
            shutil.copyfile(file, target / file.name)
    tensors: Tensors = {}
    for key, tensor in saved_tensors(source):
        if key.endswith("_proj.weight"):
            linear = key.removesuffix(".weight")
            written = chosen.write(linear, tensor)
            tensors |= {f"{linear}.{suffix}": part.contiguous() for suffix, part in written.items()}
        else:
            tensors[key] = tensor.to(chosen.dtype or tensor.dtype)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    if chosen.dtype is not None:
        config["dtype"] = str(chosen.dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": chosen.config}, indent=2))
    return target


def saved_tensors(source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of a folder's safetensors files, one tensor in memory at a time."""
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                yield key, file.get_tensor(key)


@dataclass(frozen=True)
class Quantized:
    """A linear layer in groups of columns: W = scales · (integers - zeros).

    integers: [out, in], from 0. scales, zeros: [out, groups]. groups: [in], the group of each column.
    """

    integers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor
    bits: int

    def dequantized(self) -> torch.Tensor:
        """Return W in float32, each weight rounded once."""
        return self.scales.float()[:, self.groups] * (self.integers - self.zeros[:, self.groups])


def quantize(
    weight: torch.Tensor, bits: int, groups: int | torch.Tensor, sym: bool = True, dtype: torch.dtype | None = None
) -> Quantized:
    """Round to nearest. groups: the columns of a group, or each column's. dtype: of the scales; None is the weight's.

    A symmetric range is as wide as the largest weight, so that it is rounded to half a step beyond the largest integer.
    Zero points are at least 1: version 1 of GPTQ can't store a 0.
    """
    if isinstance(groups, int):
        groups = torch.arange(weight.shape[1]) // groups
    members = [weight[:, groups == group] for group in range(int(groups.max()) + 1)]
    low = torch.stack([columns.amin(1) for columns in members], 1).clamp(max=0)
    high = torch.stack([columns.amax(1) for columns in members], 1).clamp(min=0)
    half, largest = 2 ** (bits - 1), 2**bits - 1
    if sym:
        scales = (torch.maximum(-low, high) / (half - 0.5)).clamp(min=_MIN_SCALE)
        zeros = torch.full_like(scales, half).int()
    else:
        scales = ((high - low).float() / largest).clamp(min=_MIN_SCALE).to(dtype or weight.dtype).float()
        zeros = (-low / scales).round().clamp(1, largest).int()
    integers = (weight / scales[:, groups]).round().int() + zeros[:, groups]
    return Quantized(integers.clamp(0, largest), scales.to(dtype or weight.dtype), zeros, groups, bits)


def packed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack the unsigned integers of rows into int32, the first into the lowest bits."""
    fields = values.int().reshape(len(values), -1, 32 // bits) << torch.arange(0, 32, bits, dtype=torch.int32)
    return fields.sum(-1, dtype=torch.int32)


def int_quantized(layer: Quantized, sym: bool = True) -> Tensors:
    """8 bits."""
    tensors = {"weight": (layer.integers - 128).to(torch.int8), "weight_scale": layer.scales}
    return tensors if sym else {**tensors, "weight_zero_point": (layer.zeros - 128).to(torch.int8)}


def pack_quantized(layer: Quantized, sym: bool = True, ordered: bool = False) -> Tensors:
    """ordered: with the group of each column."""
    tensors = {
        "weight_packed": packed(layer.integers, layer.bits),
        "weight_scale": layer.scales,
        "weight_shape": torch.tensor(layer.integers.shape),
    }
    if not sym:
        tensors["weight_zero_point"] = packed(layer.zeros.T, layer.bits).T
    return {**tensors, "weight_g_idx": layer.groups.int()} if ordered else tensors


def gptq(layer: Quantized, version: int = 1) -> Tensors:
    """Version 1 stores each zero point less 1."""
    return {
        "qweight": packed(layer.integers, layer.bits).T,
        "qzeros": packed(layer.zeros.T - int(version == 1), layer.bits),
        "scales": layer.scales.T,
        "g_idx": layer.groups.int(),
    }


def awq(layer: Quantized) -> Tensors:
    """Packed along the outputs, in another order within a word."""

    def reordered(values: torch.Tensor) -> torch.Tensor:
        return values.T.reshape(values.shape[1], -1, len(_AWQ_ORDER))[..., list(_AWQ_ORDER)].flatten(1)

    tensors = {"qweight": packed(reordered(layer.integers), 4), "qzeros": packed(reordered(layer.zeros), 4)}
    return {**tensors, "scales": layer.scales.T}


def _writer(
    layout: Callable[[Quantized], Tensors],
    bits: int,
    group: int | None = GROUP,
    sym: bool = True,
    act_order: bool = False,
    dtype: torch.dtype | None = None,
) -> Callable[[str, torch.Tensor], Tensors]:
    """Return the `write` of a format. group: None for one group of all columns. dtype: of the scales."""

    def write_layer(name: str, weight: torch.Tensor) -> Tensors:
        columns = weight.shape[1]
        groups = torch.arange(columns) // (group or columns)
        if act_order:
            groups = groups[_order(name, columns).argsort()]
        return layout(quantize(weight if dtype is None else weight.float(), bits, groups, sym, dtype))

    return write_layer


def _order(name: str, columns: int) -> torch.Tensor:
    """Return an order of a linear's input; q, k, v share theirs, and gate, up."""
    shared = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
    return torch.randperm(columns, generator=torch.Generator().manual_seed(sum(shared.encode())))


def float_blocks(weight: torch.Tensor, rows: int | None, columns: int | None, suffix: str = "weight_scale") -> Tensors:
    """FP8 with a scale per block. A block of None rows or columns has all. Blocks at the edges may be smaller."""
    out, width = weight.shape
    rows, columns = rows or out, columns or width
    # Padded to whole blocks [block row, row, block column, column].
    whole = torch.nn.functional.pad(weight, (0, -width % columns, 0, -out % rows))
    blocks = whole.view(-(-out // rows), rows, -(-width // columns), columns)
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = (blocks.abs().amax((1, 3)) / largest).clamp(min=_MIN_SCALE)
    values = (blocks / scale[:, None, :, None]).clamp(-largest, largest).to(torch.float8_e4m3fn)
    # A tensor's only scale has one dimension.
    flat = scale.flatten() if scale.numel() == 1 and rows > 1 else scale
    return {"weight": values.flatten(2).flatten(0, 1)[:out, :width], suffix: flat}


def _compressed_tensors(kind: str, weights: Mapping[str, object], activations: str | None = None) -> dict[str, object]:
    """Return the config. weights: beside what all have. activations: the strategy of dynamic ones; None for floats."""
    number: dict[str, object] = {"type": "float" if kind == "float-quantized" else "int", "symmetric": True}
    inputs = None
    if activations is not None:
        size = GROUP if activations == "group" else None
        inputs = {"num_bits": 8, **number, "strategy": activations, "group_size": size, "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": {**number, "dynamic": False, **weights},
        "input_activations": inputs,
        "output_activations": None,
        "format": kind,
    }
    head = {"quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed"}
    return {**head, "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None}


def _gptq_format(bits: int, sym: bool = True, act_order: bool = False) -> Format:
    settings = {"bits": bits, "group_size": GROUP, "sym": sym, "desc_act": act_order, "lm_head": False}
    config = {"quant_method": "gptq", **settings, "damp_percent": 0.01, "checkpoint_format": "gptq"}
    return Format(_writer(gptq, bits, GROUP, sym, act_order, torch.float16), config, torch.float16)


def _packed_format(bits: int, group: int | None) -> Format:
    weights = {"num_bits": bits, "strategy": "group" if group else "channel", "group_size": group}
    return Format(_writer(pack_quantized, bits, group), _compressed_tensors("pack-quantized", weights))


def _float_format(strategy: str, rows: int | None, columns: int | None) -> Format:
    structure = [rows, columns] if strategy == "block" else None
    weights = {"num_bits": 8, "strategy": strategy, "block_structure": structure}
    config = _compressed_tensors("float-quantized", weights, "group" if strategy == "block" else "token")
    return Format(lambda _, weight: float_blocks(weight, rows, columns), config)


FORMATS: Mapping[str, Format] = {
    "w8a8": Format(
        _writer(int_quantized, 8, None),
        _compressed_tensors("int-quantized", {"num_bits": 8, "strategy": "channel"}, "token"),
    ),
    "w8a16": _packed_format(8, None),
    "w8a16-groups": _packed_format(8, GROUP),
    "w4a16": _packed_format(4, GROUP),
    "gptq4": _gptq_format(4),
    "gptq4-asymmetric": _gptq_format(4, sym=False),
    "gptq4-act-order": _gptq_format(4, act_order=True),
    "gptq8": _gptq_format(8),
    "awq4": Format(
        _writer(awq, 4, sym=False, dtype=torch.float16),
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        torch.float16,
    ),
    "fp8-tensor": _float_format("tensor", None, None),
    "fp8-channel": _float_format("channel", 1, None),
    "fp8-block": _float_format("block", GROUP, GROUP),
    "fp8": Format(
        lambda _, weight: float_blocks(weight, GROUP, GROUP, "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [GROUP, GROUP]},
    ),
}
"""By name."""
