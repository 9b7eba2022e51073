"""Reads a Llama's weights from safetensors, layer by layer, in the form that the forward pass uses.

Doesn't use transformers' modules: q|k|v and gate|up are fused while they are read. INT8 weights are read as saved, or
quantized block by block. Besides the returned weights, memory holds the current linear layer and a few blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llama_engine.errors import CheckpointError
from llama_engine.model.heads import head_dim, key_value_heads
from llama_engine.model.saved_tensors import SavedTensors
from llama_engine.model.weights import LayerWeights, LinearWeight

if TYPE_CHECKING:
    from transformers import LlamaConfig

BLOCK = 1 << 18
"""Number of weights converted at once. Their floats fit the CPU's cache: five times faster than whole matrices."""

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens", "model.norm", "lm_head"
_QUERY_KEY_VALUE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_FLOATS = ("F64", "F32", "F16", "BF16")
MAX_WEIGHT = 127
"""Largest magnitude of an INT8 weight, that of its row's largest value; bitsandbytes saves that value as SCB."""
_ROW_FORMAT = 0
"""bitsandbytes' number for the row layout, its only layout of INT8 weights since 2024."""

_log = logging.getLogger(__name__)


class WeightReader:
    """Reads the weights of one checkpoint.

    Returned tensors are in private memory, not memory-mapped: mapped pages count as free memory, are read from the
    volume again when memory is short, and crash the process if the volume disappears.
    """

    def __init__(
        self, folder: Path, config: LlamaConfig, dtype: torch.dtype, int8: bool, device: torch.device | None = None
    ) -> None:
        """Read and check the headers of the files.

        dtype: of unquantized weights. int8: return linear layers and head in INT8; if they are saved in floats, they
        are quantized on the CPU. device: device of the returned tensors; None is the CPU.
        Raises CheckpointError for a weight that is missing or has an unexpected shape or an unsupported dtype.
        """
        self._saved = SavedTensors(folder)
        self._dtype, self._int8, self._device = dtype, int8, device or torch.device("cpu")
        self._tied = config.tie_word_embeddings
        # A tied checkpoint may contain the shared matrix under the head's name only.
        embedding_is_saved = f"{_EMBEDDING}.weight" in self._saved or f"{_HEAD}.weight" not in self._saved
        self._embedding_name = _EMBEDDING if embedding_is_saved or not self._tied else _HEAD
        self._embedding: torch.Tensor | None = None
        self._check(folder, _shapes(config))

    def embedding(self) -> torch.Tensor:
        """Return the embedding matrix [vocabulary, hidden], unquantized; the same tensor at every call."""
        if self._embedding is None:
            self._embedding = self._floats(f"{self._embedding_name}.weight")
        return self._embedding

    def norm(self) -> torch.Tensor:
        """Return the gain of the final RMSNorm, [hidden]."""
        return self._floats(f"{_NORM}.weight")

    def head(self) -> LinearWeight:
        """Return the output projection, [vocabulary, hidden]. An unquantized tied head is the embedding's tensor."""
        if not self._head_is_embedding():
            return self._linear(_HEAD)
        return self._linear(self._embedding_name) if self._int8 else LinearWeight(self.embedding())

    def layer(self, index: int) -> LayerWeights:
        """Return the weights of a decoder layer. index: from 0."""
        prefix = f"model.layers.{index}."
        return LayerWeights(
            attention_norm=self._floats(f"{prefix}input_layernorm.weight"),
            query_key_value=self._linear(*(prefix + part for part in _QUERY_KEY_VALUE)),
            attention_output=self._linear(f"{prefix}self_attn.o_proj"),
            mlp_norm=self._floats(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._linear(*(prefix + part for part in _GATE_UP)),
            down=self._linear(f"{prefix}mlp.down_proj"),
        )

    def _head_is_embedding(self) -> bool:
        """Return whether the head is tied to the embedding. As in transformers, saved matrices that differ are not."""
        embedding, head = f"{_EMBEDDING}.weight", f"{_HEAD}.weight"
        if not self._tied or not {embedding, head} <= self._saved.keys():
            return self._tied
        return all(
            torch.equal(self._saved.read(embedding, rows), self._saved.read(head, rows))
            for rows in self._blocks(embedding)
        )

    def _floats(self, name: str) -> torch.Tensor:
        result = torch.empty(self._saved[name].shape, dtype=self._dtype)
        self._convert(name, result)
        return result.to(self._device)

    def _linear(self, *parts: str) -> LinearWeight:
        """Return the fused linear layer of these saved layers, whose rows are concatenated in order."""
        heights = [self._saved[f"{part}.weight"].shape[0] for part in parts]
        rows, columns = sum(heights), self._saved[f"{parts[0]}.weight"].shape[1]
        weight = torch.empty(rows, columns, dtype=torch.int8 if self._int8 else self._dtype)
        scales = torch.empty(rows, dtype=torch.float32) if self._int8 else None
        first = 0
        for part, height in zip(parts, heights, strict=True):
            of_part = slice(first, first + height)
            if scales is None or f"{part}.SCB" in self._used:
                self._convert(f"{part}.weight", weight[of_part])
                if scales is not None:
                    self._convert(f"{part}.SCB", scales[of_part])
            else:
                self._quantize(f"{part}.weight", weight[of_part], scales[of_part])
            first += height
        biases = [self._floats(name) for part in parts if (name := f"{part}.bias") in self._used]
        on_device = None if scales is None else (scales / MAX_WEIGHT).to(self._device)
        return LinearWeight(weight.to(self._device), on_device, torch.cat(biases) if biases else None)

    def _convert(self, name: str, result: torch.Tensor) -> None:
        """Read a tensor into `result`, converting it to the dtype of `result`."""
        if self._saved[name].torch_dtype == result.dtype:
            self._saved.read_into(name, result)
        else:
            self._in_blocks(name, lambda rows, block: result[rows].copy_(block))

    def _quantize(self, name: str, weight: torch.Tensor, scales: torch.Tensor) -> None:
        """Quantize a saved tensor to INT8 as transformers and bitsandbytes do: via the model's dtype and float16."""

        def quantize(rows: slice, block: torch.Tensor) -> None:
            weight[rows], scales[rows] = quantize_rows(block.to(self._dtype).to(torch.float16))

        self._in_blocks(name, quantize)

    def _in_blocks(self, name: str, work: Callable[[slice, torch.Tensor], object]) -> None:
        """Call `work` with the row range and the content of each block of a tensor, in several threads."""
        # One thread per block, instead of PyTorch's threads for each operation: those synchronize ten times per block,
        # and each time wait for a scheduler slice if another process runs on one of their cores.
        threads = torch.get_num_threads()
        try:
            with ThreadPoolExecutor(threads, "read", torch.set_num_threads, (1,)) as pool:
                for _ in pool.map(lambda rows: work(rows, self._saved.read(name, rows)), self._blocks(name)):
                    pass
        finally:
            # PyTorch's thread count is per thread, and the last value set applies to new threads.
            torch.set_num_threads(threads)

    def _blocks(self, name: str) -> list[slice]:
        """Return the row ranges of a tensor's blocks."""
        rows, *others = self._saved[name].shape
        height = max(1, BLOCK // max(1, prod(others)))
        return [slice(first, min(first + height, rows)) for first in range(0, rows, height)]

    def _check(self, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        """Check shapes, dtypes and layout of the tensors to read, and store their names in `_used`."""
        saved = self._saved
        if self._embedding_name == _HEAD:
            del shapes[f"{_EMBEDDING}.weight"]
        elif self._tied and f"{_HEAD}.weight" not in saved:
            del shapes[f"{_HEAD}.weight"]
        matrices = {name for name, shape in shapes.items() if len(shape) == 2} - {f"{self._embedding_name}.weight"}
        in_int8 = {name for name in matrices if self._int8 and name in saved and saved[name].dtype == "I8"}
        shapes |= {f"{name.removesuffix('weight')}SCB": shapes[name][:1] for name in in_int8}
        absent = sorted(name for name, shape in shapes.items() if name not in saved or saved[name].shape != shape)
        if absent:
            raise CheckpointError(
                f"{folder} lacks {len(absent)} weights or has them in another shape, first {absent[0]}"
            )
        for name in sorted(shapes.keys() - in_int8):
            if saved[name].dtype not in _FLOATS:
                raise CheckpointError(f"{folder} has {name} in {saved[name].dtype}, not in {', '.join(_FLOATS)}")
        formats = [name for name in saved if name.endswith(".weight_format")]
        for name in formats:
            if (layout := saved.read(name).item()) != _ROW_FORMAT:
                raise CheckpointError(f"{folder} has {name} {layout}, not {_ROW_FORMAT}: rows")
        self._used = shapes.keys()
        if in_int8 and (floats := matrices - in_int8 - {f"{_HEAD}.weight"}):
            _log.warning("%d linear layers are saved in floats and quantized now, first %s", len(floats), min(floats))
        # Old checkpoints contain RoPE's frequencies, which are not needed.
        others = (name for name in saved.keys() - self._used - {*formats} if not name.endswith(".rotary_emb.inv_freq"))
        if unused := sorted(others):
            _log.warning("%d saved tensors are not a Llama's and are ignored, first %s", len(unused), unused[0])


def quantize_rows(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a float16 matrix to INT8; return it and the float32 scale of each row, its largest magnitude.

    Gives the same bits as bitsandbytes' `int8_vectorwise_quant` on a CPU, without its import, which takes seconds.
    """
    scales = block.abs().amax(dim=1).float()
    return torch.round(block * (127.0 / scales[:, None])).to(torch.int8), scales


def _shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of an unquantized Llama by name."""
    hidden, middle = config.hidden_size, config.intermediate_size
    queries, keys = (count * head_dim(config) for count in (config.num_attention_heads, key_value_heads(config)))
    linears = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (config.vocab_size, hidden) for name in (_EMBEDDING, _HEAD)}
    shapes[f"{_NORM}.weight"] = (hidden,)
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = (hidden,)
        for name, shape in linears.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if config.attention_bias if name.startswith("self_attn") else config.mlp_bias:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
    return shapes
