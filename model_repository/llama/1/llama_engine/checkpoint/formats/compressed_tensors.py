"""compressed-tensors, as llm-compressor saves it: INT8 and FP8 weights, and packed 4- and 8-bit integers in groups.

Source: `compressors/naive_quantized` (int-quantized, float-quantized, naive-quantized), `compressors/pack_quantized`
and `quantization/quant_args.py` of compressed-tensors 0.20; its release 0.12 for `weight_g_idx` and for zero points
that aren't packed.

What a layer has is read from its tensors, so that groups of the config with different targets need no matching.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from llama_engine.bounds import show
from llama_engine.checkpoint.formats.fp8 import Fp8, read_block
from llama_engine.checkpoint.formats.grouped_integers import (
    GroupedIntegers,
    GroupedLinears,
    consecutive_groups,
    group_count,
    read_group_size,
    read_groups,
    served_groups,
)
from llama_engine.checkpoint.formats.linear_format import (
    BITS,
    FLOATS,
    Expected,
    Groups,
    activation_scales,
    log_activation_scales,
    packed_length,
    read_scales,
    unpack,
)
from llama_engine.checkpoint.tensor_names import SavedLinear
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.errors import CheckpointError


class CompressedTensors:
    """Reads the layers of compressed-tensors: FP8 by `Fp8`, integers here."""

    def __init__(self, saved: SavedTensors, config: Mapping[str, Any]) -> None:
        """Raises CheckpointError for a sparse, transformed or otherwise unsupported checkpoint."""
        self._saved, self._linears = saved, GroupedLinears(saved)
        weights = weight_options(saved.source, config)
        sizes = {read_group_size(saved, scheme) for scheme in weights if scheme.get("group_size")}
        self._sizes = sorted(sizes | {-1})
        blocks = [read_block(saved, "block_structure", scheme["block_structure"]) for scheme in weights
                  if scheme.get("block_structure")]  # fmt: skip
        self._floats = Fp8(saved, blocks)
        log_activation_scales(saved)

    def has(self, linear: SavedLinear) -> bool:
        """Return whether the layer's weight is saved as integers or in FP8."""
        saved = self._saved.get(f"{linear.name}.weight")
        return self._is_packed(linear) or self._floats.has(linear) or (saved is not None and saved.dtype == "I8")

    def tensors(self, linear: SavedLinear) -> Mapping[str, Expected]:
        """Return integers or floats, scales, and those of the shape, zero points and groups that are saved.

        Raises CheckpointError for a number of bits other than 4 and 8, and for scales whose shape fits no group size.
        """
        if self._floats.has(linear):
            return self._floats.tensors(linear)
        (outputs, inputs), name = linear.shape, linear.name
        bits, scales = self._bits(linear), Expected(self._scales_shape(linear), FLOATS)
        tensors = {f"{name}.weight_scale": scales, **activation_scales(self._saved, name)}
        if self._is_packed(linear):
            tensors[f"{name}.weight_packed"] = Expected((outputs, packed_length(inputs, bits)), ("I32",))
            tensors[f"{name}.weight_shape"] = Expected((2,), ("I32", "I64"))
        else:
            tensors[f"{name}.weight"] = Expected(linear.shape, ("I8",))
        zeros, groups = f"{name}.weight_zero_point", f"{name}.weight_g_idx"
        if self._has_packed_zeros(name):
            count = scales.shape[1] if len(scales.shape) == 2 else 1
            tensors[zeros] = Expected((packed_length(outputs, bits), count), ("I32",))
        elif zeros in self._saved:
            tensors[zeros] = Expected(scales.shape, ("I8",))
        if groups in self._saved:
            tensors[groups] = Expected((inputs,), ("I32", "I64"))
        return tensors

    def groups(self, linear: SavedLinear) -> Groups | None:
        """Return the groups of a layer; None is INT8 per channel."""
        if self._floats.has(linear):
            return None
        outputs, inputs = linear.shape
        # Scales per tensor and per channel are one group.
        count = max(1, prod(self._scales_shape(linear)) // outputs)
        size = self._group_size(inputs, count)
        offsets, order = (f"{linear.name}.{name}" in self._saved for name in ("weight_zero_point", "weight_g_idx"))
        return served_groups(inputs, Groups(self._bits(linear), size, offsets, order))

    def read(self, linear: SavedLinear) -> LinearWeight:
        """Return a layer without its bias. Raises CheckpointError for contents that are invalid."""
        if self._floats.has(linear):
            return self._floats.read(linear)
        scales = self._per_channel(linear, read_scales(self._saved, f"{linear.name}.weight_scale"))
        return self._linears.linear(
            GroupedIntegers(
                read=self._reader(linear),
                scales=scales,
                zeros=self._zeros(linear),
                groups=self._groups(linear, scales.shape[1]),
                bits=self._bits(linear),
                name=linear.name,
            )
        )

    def _is_packed(self, linear: SavedLinear) -> bool:
        return f"{linear.name}.weight_packed" in self._saved

    def _has_packed_zeros(self, name: str) -> bool:
        zeros = self._saved.get(f"{name}.weight_zero_point")
        return zeros is not None and zeros.dtype == "I32"

    def _bits(self, linear: SavedLinear) -> int:
        packed = self._saved.get(f"{linear.name}.weight_packed")
        if packed is None:
            return 8
        for bits in BITS:
            if packed.shape == (linear.shape[0], packed_length(linear.shape[1], bits)):
                return bits
        raise CheckpointError(
            f"{self._saved.source} has {linear.name}.weight_packed in shape {packed.shape}, which isn't that of "
            f"{linear.shape} integers of 4 or 8 bits"
        )

    def _scales_shape(self, linear: SavedLinear) -> tuple[int, ...]:
        """Return the shape of the saved scales: per tensor, channel or group. If they are missing, per channel."""
        outputs, inputs = linear.shape
        name, per_channel = f"{linear.name}.weight_scale", (outputs, 1)
        shape = self._saved[name].shape if name in self._saved else per_channel
        if prod(shape) == 1 or shape == (outputs,) or shape in [(outputs, group_count(inputs, n)) for n in self._sizes]:
            return shape
        raise CheckpointError(f"{self._saved.source} has {name} in shape {shape}, not per tensor, channel or group")

    def _per_channel(self, linear: SavedLinear, values: torch.Tensor) -> torch.Tensor:
        """Return scales or zero points as [out, groups]: those per tensor or per channel are one group each."""
        groups = values.shape[1] if values.ndim == 2 else 1
        return values.view(-1, groups).expand(linear.shape[0], groups).contiguous()

    def _reader(self, linear: SavedLinear) -> Callable[[slice], torch.Tensor]:
        """Return a function that reads a range of output channels."""
        if not self._is_packed(linear):
            return lambda rows: self._saved.read(f"{linear.name}.weight", rows)
        shape = tuple(self._saved.read(f"{linear.name}.weight_shape").tolist())
        if shape != linear.shape:
            raise CheckpointError(f"{self._saved.source} has {shape} in {linear.name}.weight_shape, not {linear.shape}")
        name, bits = f"{linear.name}.weight_packed", self._bits(linear)
        return lambda rows: unpack(self._saved.read(name, rows), bits)[:, : linear.shape[1]]

    def _zeros(self, linear: SavedLinear) -> torch.Tensor | None:
        """Return the zero points [out, groups], less the centre."""
        name, bits = f"{linear.name}.weight_zero_point", self._bits(linear)
        if name not in self._saved:
            return None
        if self._has_packed_zeros(linear.name):
            return unpack(self._saved.read(name).t(), bits)[:, : linear.shape[0]].t().contiguous()
        zeros = self._per_channel(linear, self._saved.read(name))
        limit = 1 << (bits - 1)
        # Both bounds fit int8.
        if len(outside := zeros[(zeros < -limit) | (zeros > limit - 1)]):
            raise CheckpointError(
                f"{self._saved.source} has zero point {int(outside[0])} in {name}, not {-limit} to {limit - 1}"
            )
        return zeros

    def _groups(self, linear: SavedLinear, count: int) -> torch.Tensor:
        """Return the group of each input."""
        inputs, name = linear.shape[1], f"{linear.name}.weight_g_idx"
        # The saved value is initialized to -1, which stands for consecutive groups.
        if name in self._saved and (self._saved.read(name) != -1).any():
            return read_groups(self._saved, name, count)
        return consecutive_groups(inputs, self._group_size(inputs, count))

    def _group_size(self, inputs: int, count: int) -> int:
        """Return the size of groups of which a channel has `count`; -1 is the whole channel."""
        return next(size for size in self._sizes if group_count(inputs, size) == count)


_FORMATS = ("int-quantized", "naive-quantized", "float-quantized", "pack-quantized", "mixed-precision", "dense")
_WEIGHTS = ("int4", "int8", "float8")

_log = logging.getLogger(__name__)


def weight_options(folder: Path, config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the options of the weights (`QuantizationArgs`) of each group of the config.

    Raises CheckpointError, naming the field, for a config that the engine doesn't serve; logs what it ignores.
    """
    sparsity, transforms = config.get("sparsity_config") or {}, config.get("transform_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise _refusal(folder, "sparsity_config.format", sparsity["format"], "serves dense weights")
    if kinds := [group.get("type") for group in (transforms.get("config_groups") or {}).values()]:
        raise _refusal(folder, "transform_config", kinds, "applies no transforms")
    _check_format(folder, config.get("format"))
    if config.get("kv_cache_scheme"):
        _log.warning("kv_cache_scheme is ignored: the setting kv_cache_dtype selects the KV cache's dtype")
    # A group of the config may also be a preset's name with its targets: their tensors determine the format.
    schemes = [scheme for scheme in (config.get("config_groups") or {}).values() if isinstance(scheme, dict)]
    for scheme in schemes:
        _check_scheme(folder, scheme)
    return [scheme["weights"] for scheme in schemes if scheme.get("weights")]


def _check_scheme(folder: Path, scheme: Mapping[str, Any]) -> None:
    weights, activations = scheme.get("weights"), scheme.get("input_activations") or {}
    _check_format(folder, scheme.get("format"))
    if weights and (kind := f"{weights.get('type', 'int')}{weights.get('num_bits', 8)}") not in _WEIGHTS:
        raise _refusal(folder, "weights", kind, f"reads {', '.join(_WEIGHTS)}")
    if not activations.get("symmetric", True):
        raise _refusal(folder, "input_activations.symmetric", False, "quantizes activations without zero points")


def _check_format(folder: Path, name: object) -> None:
    if name is not None and name not in _FORMATS:
        raise _refusal(folder, "format", name, f"reads {', '.join(_FORMATS)}")


def _refusal(folder: Path, field: str, value: object, does: str) -> CheckpointError:
    return CheckpointError(f"{folder}: {field} is {show(value)}; this engine {does}")
