"""The weights of a checkpoint as they are served, without contents: on PyTorch's meta device, from the headers alone.

`ReadWeights` counts them as it counts those that `WeightReader` returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from llama_engine.model.architecture import Architecture
from llama_engine.model.formats.linear_format import Groups, LinearFormat
from llama_engine.model.saved_tensors import SavedTensors
from llama_engine.model.tensor_names import (
    EMBEDDING,
    HEAD,
    SavedLinear,
    all_linears,
    layer_linears,
    layer_norms,
    layer_prefix,
)
from llama_engine.model.weights import LayerWeights, LinearWeight, concatenated

_META = torch.device("meta")

_NF4_BLOCK = 64
"""Weights that share a scale where bitsandbytes quantizes to NF4."""


class HeaderReader:
    """Returns what `WeightReader` does, without contents. The headers must have been checked by one.

    Groups are those of `LinearFormat.groups`. A head beside the embedding that it is tied to counts as the embedding.
    """

    def __init__(
        self,
        architecture: Architecture,
        dtype: torch.dtype,
        quantized: LinearFormat | None = None,
        int8: bool = False,
    ) -> None:
        """Take arguments of `WeightReader`."""
        self._architecture, self._quantized = architecture, quantized if int8 else None
        self._dtype, self._int8 = dtype, int8
        self._linears, self._norms = layer_linears(architecture), layer_norms(architecture)
        self._embedding = self._floats(architecture.vocabulary, architecture.hidden)

    def embedding(self) -> torch.Tensor:
        """Return the embedding matrix [vocabulary, hidden]; the same tensor at every call."""
        return self._embedding

    def norm(self) -> torch.Tensor:
        """Return the gain of the final RMSNorm, [hidden]."""
        return self._gain(self._architecture.hidden)

    def head(self) -> LinearWeight:
        """Return the output projection, [vocabulary, hidden]. An unquantized tied head is the embedding's tensor."""
        shape = self._architecture.vocabulary, self._architecture.hidden
        saved = self._groups(SavedLinear(HEAD, shape)) is not None
        if self._architecture.tied and not self._int8:
            return LinearWeight(self._embedding)
        return self._linear([SavedLinear(EMBEDDING if self._architecture.tied and not saved else HEAD, shape)])

    def layer(self, index: int) -> LayerWeights:
        """Return the weights of a decoder layer. index: from 0."""
        prefix = layer_prefix(index)
        norms = dict[str, torch.Tensor | None](attention_norm=None, mlp_norm=None)
        norms |= {field: self._gain(size) for field, (_, size) in self._norms.items()}
        linears = {
            field: self._linear([part.named(prefix) for part in parts]) for field, parts in self._linears.items()
        }
        return LayerWeights(**norms, **linears)  # type: ignore[arg-type]  # the names are the fields

    def _gain(self, size: int) -> torch.Tensor:
        return self._floats(size).float() if self._architecture.gain_offset else self._floats(size)

    def _floats(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=_META)

    def _linear(self, parts: Sequence[SavedLinear]) -> LinearWeight:
        read = [self._part(part) for part in parts]
        try:
            weight = concatenated(read)
        except ValueError:
            weight = _rows((sum(part.shape[0] for part in parts), parts[0].shape[1]))
        if any(groups.has_order for part in parts if (groups := self._groups(part)) is not None):
            weight = replace(weight, order=torch.empty(weight.weight.shape[1], dtype=torch.int64, device=_META))
        biases = [self._floats(part.shape[0]) for part in parts if part.bias]
        return weight.to(_META, torch.cat(biases) if biases else None)

    def _part(self, part: SavedLinear) -> LinearWeight:
        if not self._int8:
            return LinearWeight(self._floats(*part.shape))
        if (groups := self._groups(part)) is None:
            return _rows(part.shape)
        scales = torch.empty(part.shape[0], part.shape[1] // groups.size, device=_META)
        weight = torch.empty(part.shape, dtype=torch.int8, device=_META)
        return LinearWeight(weight, scales, None, torch.empty_like(scales) if groups.has_offsets else None, groups.bits)

    def _groups(self, part: SavedLinear) -> Groups | None:
        quantized = self._quantized
        return quantized.groups(part) if quantized is not None and quantized.has(part) else None


def _rows(shape: tuple[int, int]) -> LinearWeight:
    """Return INT8 rows."""
    return LinearWeight(torch.empty(shape, dtype=torch.int8, device=_META), torch.empty(shape[0], device=_META))


def module_sizes(
    saved: SavedTensors, architecture: Architecture, dtype: torch.dtype, kind: str, quantized: LinearFormat | None
) -> tuple[Counter[str], int]:
    """Return the number of linear layers by dtype and the bytes of all weights, as transformers' modules hold them.

    kind: nf4 or int8, of the linear layers besides the head. quantized: their format; None if they are quantized now.
    """
    vocabulary, hidden = architecture.vocabulary, architecture.hidden
    floats = hidden * (vocabulary if architecture.tied else 2 * vocabulary) + hidden
    linears = Counter({str(dtype).removeprefix("torch."): 1})
    floats += architecture.layers * sum(count for _, count in layer_norms(architecture).values())
    size = 0
    for linear in all_linears(architecture):
        count = prod(linear.shape)
        floats += linear.shape[0] if linear.bias else 0
        if quantized is not None and not quantized.has(linear):
            linears[str(dtype).removeprefix("torch.")] += 1
            floats += count
            continue
        linears[kind] += 1
        if kind == "int8":
            size += count + 4 * linear.shape[0]
        elif quantized is None:
            size += -(-count // 2) + 4 * -(-count // _NF4_BLOCK)
        else:
            names = [f"{linear.name}.weight{suffix}" for suffix in ("", ".absmax", ".nested_absmax")]
            size += sum(saved[name].end - saved[name].begin for name in names if name in saved)
    return linears, size + floats * dtype.itemsize
