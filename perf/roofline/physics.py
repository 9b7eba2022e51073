"""The least time that a load can take on a device, with any server.

A decode step samples one token per row; it must read every weight once and every cached position of its rows once, and
do two operations per weight and row:

    t >= (weight bytes + rows x context x bytes per position) / bandwidth
    t >= (2 x parameters + attention) x rows / matrix rate

The larger one is the bound: bandwidth for few rows, operations for many. More rows in a step share one reading of the
weights; that is why batching pays until operations are the bound.

Over a whole load of requests, at most `rows` of them in a step:

    passes     >= the longest output: its first token comes from the prefill, each other one from a step
               >= 1 + (all output tokens - 1 a request) / rows
    bytes      >= passes x weights + every cached position at every step of its row
    operations >= 2 x parameters x (prompt tokens + decoded tokens), the head once per output token, and attention
    seconds    >= the larger of bytes / bandwidth and operations / matrix rate

For a rate measured in steady state the first two lines do not hold, and the passes are
(all output tokens - 1 a request) / rows (`steady`).

So prefill costs its operations here, and no reading of weights that steps could not share: a server that mixes both in
one pass can't exceed this bound either. What never counts: Python, launching kernels, padding, sampling, text, network.
Prompts with a common prefix could share its cache; no server here does.

Llama-2-7B (13.2 GB of FP16 without the embedding, 6.74 GB in INT8 with the head in FP16, 0.5 MiB of cache a position),
200 tokens in a context of 300: on an A10G (600 GB/s) a request alone takes at least 4.5 s in FP16, and 32 rows make at
most 5.3 requests/s in FP16 and 8.2 in INT8; on an H100 (3.0 TB/s) 26.3 and 40.8.

Counted are the matrices of the layers, the head and the KV cache. Embeddings are looked up, one line a token, and norms
are a few vectors; neither is counted. Tying head and embedding makes no difference: the head is read whole either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import LlamaConfig

from perf.roofline.rates import BYTES, DeviceRates, Weights


@dataclass(frozen=True)
class Formats:
    """weights: of the layers' matrices. computing: of everything else, cache and head included."""

    weights: Weights
    computing: Weights

    @classmethod
    def of(cls, weights: Weights, device: str) -> Formats:
        """Return the engine's formats with these weights: around INT8, FP16 on a GPU and FP32 on a CPU."""
        around: Weights = "fp32" if device == "cpu" else "fp16"
        return cls(weights, around if weights == "int8" else weights)


@dataclass(frozen=True)
class LlamaShape:
    """A Llama's counts.

    matrices: parameters of the layers' matrices. matrix_rows: output rows of those matrices, each with a scale in INT8.
    head: parameters of the head. cached: values per cached position, keys and values of all layers. attended:
    operations of attention for one token that looks at one position, all layers, scores and sums.
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
        # Per layer: queries and attention's output, keys and values; gate, up and down.
        attention = 2 * hidden * queries + 2 * hidden * keys
        return cls(
            matrices=layers * (attention + 3 * hidden * inner),
            matrix_rows=layers * (queries + 2 * keys + hidden + 2 * inner + hidden),
            head=hidden * config.vocab_size,
            cached=layers * 2 * keys,
            # Every query head has its own scores and sums, also where heads share keys and values.
            attended=layers * 2 * 2 * queries,
        )

    def weight_bytes(self, formats: Formats) -> int:
        """Return the bytes of weights that a step reads: the matrices, in INT8 their FP32 row scales, and the head."""
        scales = 4 * self.matrix_rows if formats.weights == "int8" else 0
        return self.matrices * BYTES[formats.weights] + scales + self.head * BYTES[formats.computing]

    def cached_bytes(self, formats: Formats) -> int:
        """Return the bytes that a step reads for each cached position of a row."""
        return self.cached * BYTES[formats.computing]


@dataclass(frozen=True)
class Roofline:
    """The best possible. tokens_per_second: output tokens of the load. seconds: of the whole load.

    step_seconds, bytes_per_step, operations_per_step: of a step with all rows taken, at the load's mean context.
    prefill_seconds: of all prompts alone. bound_by: of the whole load.
    """

    tokens_per_second: float
    seconds: float
    passes: int
    step_seconds: float
    bytes_per_step: int
    operations_per_step: int
    prefill_seconds: float
    bandwidth: float
    bound_by: Literal["bandwidth", "operations"]

    def beside(self, tokens_per_second: float) -> dict[str, float | str]:
        """Return the entry "limit" of a measurement with this many output tokens per second."""
        return {
            "tokens_per_second": round(self.tokens_per_second, 1),
            "fraction": round(tokens_per_second / self.tokens_per_second, 4),
            "bound_by": self.bound_by,
        }


@dataclass(frozen=True)
class _Work:
    """Operations: products with the layers' matrices, and all others, which have another format."""

    matrices: int
    computing: int

    def seconds(self, formats: Formats, rates: DeviceRates) -> float:
        return self.matrices / rates.multiply(formats.weights) + self.computing / rates.multiply(formats.computing)


def roofline(
    config: LlamaConfig,
    weights: Weights,
    rates: DeviceRates,
    rows: int,
    requests: Sequence[int],
    prompt_tokens: int,
    steady: bool = False,
) -> Roofline:
    """Return the bound of a load on a device. Raises ValueError for a load without requests or tokens.

    rows: largest number of requests in a step. requests: the output tokens of each. prompt_tokens: of every request.
    steady: of a load in steady state, instead of one that begins and ends.
    """
    if rows < 1 or prompt_tokens < 1 or not requests or min(requests) < 1:
        raise ValueError(
            f"rows is {rows}, prompt_tokens {prompt_tokens}, output tokens {list(requests)}: each must be at least 1"
        )
    shape, formats = LlamaShape.of(config), Formats.of(weights, rates.device)
    # The first token of a request is the prefill's; with n of them, n - 1 are decoded, with p … p + n - 2 positions
    # cached.
    decoded = sum(requests) - len(requests)
    positions = sum((tokens - 1) * prompt_tokens + (tokens - 1) * (tokens - 2) // 2 for tokens in requests)
    context = positions / decoded if decoded else float(prompt_tokens)
    step_bytes = bytes_per_step(config, weights, rates.device, rows, context)
    bandwidth = rates.read(step_bytes)
    step = _decode(shape, rows, round(rows * context))
    prefill = _prefill(shape, len(requests), prompt_tokens)
    passes = -(-decoded // rows) if steady else max(1 + -(-decoded // rows), max(requests))
    reading = (passes * shape.weight_bytes(formats) + positions * shape.cached_bytes(formats)) / bandwidth
    computing = _decode(shape, decoded, positions).seconds(formats, rates) + prefill.seconds(formats, rates)
    seconds = max(reading, computing)
    return Roofline(
        tokens_per_second=sum(requests) / seconds,
        seconds=seconds,
        passes=passes,
        step_seconds=max(step_bytes / bandwidth, step.seconds(formats, rates)),
        bytes_per_step=step_bytes,
        operations_per_step=step.matrices + step.computing,
        prefill_seconds=prefill.seconds(formats, rates),
        bandwidth=bandwidth,
        bound_by="bandwidth" if reading > computing else "operations",
    )


def bytes_per_step(config: LlamaConfig, weights: Weights, device: str, rows: int, context: float) -> int:
    """Return the bytes that a decode step of `rows` rows reads, each with `context` cached positions."""
    shape, formats = LlamaShape.of(config), Formats.of(weights, device)
    return shape.weight_bytes(formats) + round(rows * context * shape.cached_bytes(formats))


def _decode(shape: LlamaShape, tokens: int, positions: int) -> _Work:
    """Return the work of `tokens` decoded tokens, which attend to `positions` cached ones in total, and themselves."""
    return _Work(2 * shape.matrices * tokens, 2 * shape.head * tokens + shape.attended * (positions + tokens))


def _prefill(shape: LlamaShape, prompts: int, tokens: int) -> _Work:
    """Return the work of reading prompts: each token attends to itself and all before it."""
    looks = tokens * (tokens + 1) // 2
    return _Work(2 * shape.matrices * prompts * tokens, (2 * shape.head + shape.attended * looks) * prompts)
