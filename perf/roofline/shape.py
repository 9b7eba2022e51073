"""How much of a Llama a step has to read and to compute, from the checkpoint's own config.

Counted are the matrices of the layers, the head, and what the cache holds of a position. Embeddings are looked up, one
line a token, and norms are a few vectors; neither is counted. Whether head and embedding are one tensor makes no
difference: the head is read whole either way.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import LlamaConfig

from perf.roofline.rates import BYTES, Weights


@dataclass(frozen=True)
class Formats:
    """In what a model is kept. weights: of the layers' matrices. computing: of everything else, cache and head too."""

    weights: Weights
    computing: Weights

    @classmethod
    def of(cls, weights: Weights, device: str) -> Formats:
        """Return what the engine makes of these weights: around INT8, FP16 on a GPU and FP32 on a CPU."""
        around: Weights = "fp32" if device == "cpu" else "fp16"
        return cls(weights, around if weights == "int8" else weights)


@dataclass(frozen=True)
class LlamaShape:
    """A Llama's counts.

    matrices: parameters of the layers' matrices. matrix_rows: output rows of those matrices, each with a scale in INT8.
    head: parameters of the head. cached: numbers that the cache holds of a position, keys and values, all layers.
    attended: operations of attention for one token that looks at one position, all layers, scores and sums.
    """

    matrices: int
    matrix_rows: int
    head: int
    cached: int
    attended: int

    @classmethod
    def of(cls, config: LlamaConfig) -> LlamaShape:
        """Count."""
        hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
        heads = config.num_attention_heads
        head_size = config.head_dim or hidden // heads
        queries, keys = heads * head_size, (config.num_key_value_heads or heads) * head_size
        # Of a layer: queries and attention's output, keys and values; gate, up and down.
        attention = 2 * hidden * queries + 2 * hidden * keys
        return cls(
            matrices=layers * (attention + 3 * hidden * inner),
            matrix_rows=layers * (queries + 2 * keys + hidden + 2 * inner + hidden),
            head=hidden * config.vocab_size,
            cached=layers * 2 * keys,
            # Every query head has scores and sums of its own, also where heads share keys and values.
            attended=layers * 2 * 2 * queries,
        )

    def weight_bytes(self, formats: Formats) -> int:
        """Return what every step reads, whoever is in it: the matrices, in INT8 their FP32 row scales, and the head."""
        scales = 4 * self.matrix_rows if formats.weights == "int8" else 0
        return self.matrices * BYTES[formats.weights] + scales + self.head * BYTES[formats.computing]

    def cached_bytes(self, formats: Formats) -> int:
        """Return what a step reads for each position that a row has in the cache."""
        return self.cached * BYTES[formats.computing]
