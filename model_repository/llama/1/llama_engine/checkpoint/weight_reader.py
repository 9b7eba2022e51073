"""Reads a model's weights layer by layer, in the form that the forward pass uses.

Doesn't use transformers' modules: q|k|v and gate|up are fused while they are read. Quantized weights stay as saved or
are requantized, as the table in `formats` says; floats are quantized block by block. Besides the returned weights,
memory holds the current linear layer and a few blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import prod

import torch

from llama_engine.bounds import show
from llama_engine.checkpoint.architecture import Architecture
from llama_engine.checkpoint.formats.linear_format import FLOATS, Expected, LinearFormat
from llama_engine.checkpoint.per_channel import for_each_block, quantize_per_channel, requantized, row_blocks
from llama_engine.checkpoint.tensor_names import (
    EMBEDDING,
    HEAD,
    NORM,
    SavedLinear,
    layer_linears,
    layer_norms,
    layer_prefix,
)
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.checkpoint.weights import Embedding, LayerWeights, LinearWeight, concatenated
from llama_engine.errors import CheckpointError

_log = logging.getLogger(__name__)


class WeightReader:
    """Reads the weights of one checkpoint.

    Returned tensors are in private memory, not memory-mapped: mapped pages count as free memory, are read from the
    volume again when memory is short, and crash the process if the volume disappears.
    """

    def __init__(
        self,
        saved: SavedTensors,
        architecture: Architecture,
        dtype: torch.dtype,
        quantized: LinearFormat | None = None,
        int8: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """Check the headers of the tensors.

        dtype: the unquantized weights'. quantized: format of the quantized linear layers; None if all are in floats.
        int8: quantize the others and the head to INT8 per channel, on the CPU. device: that of the returned tensors;
        None is the CPU. Raises CheckpointError for a weight that is missing or has an unexpected shape or an
        unsupported dtype.
        """
        self._saved, self._quantized = saved, quantized if int8 else None
        self._dtype, self._int8, self._device = dtype, int8, device or torch.device("cpu")
        self._architecture = architecture
        # A tied checkpoint may contain the shared matrix under the head's name only.
        embedding_is_saved = f"{EMBEDDING}.weight" in saved or f"{HEAD}.weight" not in saved
        self._embedding_name = EMBEDDING if embedding_is_saved or not architecture.tied else HEAD
        self._embedding: torch.Tensor | None = None
        self._linears, self._norms = layer_linears(architecture), layer_norms(architecture)
        self._check()

    def embedding(self) -> torch.Tensor:
        """Return the embedding matrix [vocabulary, hidden], unquantized; the same tensor at every call."""
        if self._embedding is None:
            self._embedding = self._floats(f"{self._embedding_name}.weight")
        return self._embedding

    def packed_embedding(self) -> Embedding:
        """Return the embedding matrix for the CPU kernels: as saved, unless floats of its dtype are smaller."""
        name = f"{self._embedding_name}.weight"
        is_smallest = self._saved[name].nbytes == self.packed_embedding_bytes
        return self._saved.as_saved(name) if is_smallest else Embedding(self._floats(name))

    @property
    def packed_embedding_bytes(self) -> int:
        """The bytes of `packed_embedding`."""
        saved = self._saved[f"{self._embedding_name}.weight"]
        return min(saved.nbytes, prod(saved.shape) * self._dtype.itemsize)

    def norm(self) -> torch.Tensor:
        """Return the gain of the final RMSNorm, [hidden]."""
        return self._gain(f"{NORM}.weight")

    def head(self) -> LinearWeight:
        """Return the output projection, [vocabulary, hidden]. An unquantized tied head is the embedding's tensor."""
        if not self._head_is_embedding():
            return self._linear([self._matrix(HEAD)])
        return self._linear([self._matrix(self._embedding_name)]) if self._int8 else LinearWeight(self.embedding())

    def layer(self, index: int) -> LayerWeights:
        """Return the weights of a decoder layer. index: counted from 0."""
        prefix = layer_prefix(index)
        norms = dict[str, torch.Tensor | None](attention_norm=None, mlp_norm=None)
        norms |= {field: self._gain(f"{prefix}{name}.weight") for field, (name, _) in self._norms.items()}
        linears = {
            field: self._linear([part.named(prefix) for part in parts]) for field, parts in self._linears.items()
        }
        return LayerWeights(**norms, **linears)  # type: ignore[arg-type]  # the names are the fields

    def _matrix(self, name: str) -> SavedLinear:
        return SavedLinear(name, (self._architecture.vocabulary, self._architecture.hidden))

    def _head_is_embedding(self) -> bool:
        """Return whether the head is tied to the embedding. Saved matrices that differ aren't, as in transformers."""
        embedding, head = f"{EMBEDDING}.weight", f"{HEAD}.weight"
        if self._format_of(self._matrix(HEAD)) is not None:
            return False
        if not self._architecture.tied or not {embedding, head} <= self._saved.keys():
            return self._architecture.tied
        return all(
            torch.equal(self._saved.read(embedding, rows), self._saved.read(head, rows))
            for rows in self._blocks(embedding)
        )

    def _gain(self, name: str) -> torch.Tensor:
        offset = self._architecture.gain_offset
        # transformers doesn't round 1 + w to the model's dtype either.
        return self._floats(name, torch.float32) + offset if offset else self._floats(name)

    def _floats(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        result = torch.empty(self._saved[name].shape, dtype=dtype or self._dtype)
        self._convert(name, result)
        return result.to(self._device)

    def _linear(self, parts: Sequence[SavedLinear]) -> LinearWeight:
        """Return the fused linear layer of these saved layers, whose output channels are concatenated in order."""
        if all(self._format_of(part) is None for part in parts):
            weight = self._from_floats(parts)
        else:
            read = [self._quantized_part(part) for part in parts]
            try:
                weight = concatenated(read)
            except ValueError:
                # Happens only if layers that share an input were quantized in different column orders.
                weight = concatenated([requantized(part) for part in read])
        biases = [self._floats(f"{part.name}.bias") for part in parts if part.bias]
        return weight.to(self._device, torch.cat(biases) if biases else None)

    def _quantized_part(self, part: SavedLinear) -> LinearWeight:
        quantized = self._format_of(part)
        return self._from_floats([part]) if quantized is None else quantized.read(part)

    def _from_floats(self, parts: Sequence[SavedLinear]) -> LinearWeight:
        """Return the linear layer of layers saved in floats, quantized if `int8`."""
        outputs, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
        weight = torch.empty(outputs, columns, dtype=torch.int8 if self._int8 else self._dtype)
        scales = torch.empty(outputs, dtype=torch.float32) if self._int8 else None
        first = 0
        for part in parts:
            channels = slice(first, first + part.shape[0])
            if scales is None:
                self._convert(f"{part.name}.weight", weight[channels])
            else:
                self._quantize(f"{part.name}.weight", weight[channels], scales[channels])
            first = channels.stop
        return LinearWeight(weight, scales)

    def _format_of(self, linear: SavedLinear) -> LinearFormat | None:
        """Return the format that the layer is read in; None is floats."""
        return self._quantized if self._quantized is not None and self._quantized.has(linear) else None

    def _convert(self, name: str, result: torch.Tensor) -> None:
        """Read a tensor into `result`, converting it to the dtype of `result`."""
        if self._saved[name].torch_dtype == result.dtype:
            self._saved.read_into(name, result)
        else:
            self._in_blocks(name, lambda rows, block: result[rows].copy_(block))

    def _quantize(self, name: str, weight: torch.Tensor, scales: torch.Tensor) -> None:
        """Read a tensor into `weight` and `scales`, quantized to INT8 as transformers and bitsandbytes do.

        They convert it to the model's dtype and then to float16.
        """

        def quantize(rows: slice, block: torch.Tensor) -> None:
            weight[rows], scales[rows] = quantize_per_channel(block.to(self._dtype).to(torch.float16))

        self._in_blocks(name, quantize)

    def _in_blocks(self, name: str, work: Callable[[slice, torch.Tensor], object]) -> None:
        """Call `work` with the row range and the content of each block of a tensor, in several threads."""
        for_each_block(self._blocks(name), lambda rows: work(rows, self._saved.read(name, rows)))

    def _blocks(self, name: str) -> list[slice]:
        """Return the row ranges of a tensor's blocks."""
        rows, *others = self._saved[name].shape
        return row_blocks(rows, prod(others))

    def _check(self) -> None:
        """Check shapes and dtypes of the tensors to read, and log those that are not read."""
        saved, source = self._saved, self._saved.source
        expected, in_floats = self._expected_tensors()
        absent = sorted(
            name for name, tensor in expected.items() if name not in saved or saved[name].shape != tensor.shape
        )
        if absent:
            raise CheckpointError(
                f"{source} lacks {len(absent)} weights or has them in another shape, first {absent[0]}"
            )
        for name, tensor in sorted(expected.items()):
            if saved[name].dtype not in tensor.dtypes:
                dtype = show(saved[name].dtype)
                raise CheckpointError(f"{source} has {name} in {dtype}, not in {', '.join(tensor.dtypes)}")
        if self._quantized is not None and in_floats:
            _log.warning(
                "%d linear layers are saved in floats and quantized now, first %s", len(in_floats), min(in_floats)
            )
        # Old checkpoints contain RoPE's frequencies, which are not needed.
        others = (name for name in saved.keys() - expected.keys() if not name.endswith(".rotary_emb.inv_freq"))
        if unused := sorted(others):
            _log.warning("%d saved tensors are not this model's and are ignored, first %s", len(unused), unused[0])

    def _expected_tensors(self) -> tuple[dict[str, Expected], list[str]]:
        """Return the tensors to read by name, and the weights of linear layers among them that are saved in floats."""
        hidden = self._architecture.hidden
        embedding = self._matrix(self._embedding_name)
        expected = {
            f"{embedding.name}.weight": Expected(embedding.shape, FLOATS),
            f"{NORM}.weight": Expected((hidden,), FLOATS),
        }
        linears = []
        head = self._matrix(HEAD)
        if not self._architecture.tied or f"{HEAD}.weight" in self._saved or self._format_of(head) is not None:
            linears.append(head)
        for index in range(self._architecture.layers):
            prefix = layer_prefix(index)
            for name, size in self._norms.values():
                expected[f"{prefix}{name}.weight"] = Expected((size,), FLOATS)
            linears += [part.named(prefix) for parts in self._linears.values() for part in parts]
        in_floats = []
        for linear in linears:
            if (quantized := self._format_of(linear)) is not None:
                expected |= quantized.tensors(linear)
            else:
                expected[f"{linear.name}.weight"] = Expected(linear.shape, FLOATS)
                in_floats.append(f"{linear.name}.weight")
            if linear.bias:
                expected[f"{linear.name}.bias"] = Expected(linear.shape[:1], FLOATS)
        return expected, [name for name in in_floats if not name.startswith(f"{HEAD}.")]
