"""The least time that a load can take on a device, with any server.

A decode step samples one token per sequence; it must read every weight once and every cached position of its sequences
once, and do two operations per weight and sequence. Over a whole load in steady state:

    passes     >= (all output tokens - 1 a request) / sequences: each one's first token comes from the prefill
    bytes      >= passes x weights + every cached position at every step of its sequence
    operations >= 2 x parameters x (prompt tokens + decoded tokens), the head once per output token, and attention
    seconds    >= the larger of bytes / bandwidth and operations / matrix rate

In INT8 an operation multiplies or adds 8-bit values, and a weight costs two for each sequence, as in W8A8. Rates are in
the same operations: the compiled kernels' rate counts both terms of exact INT8. Python, launches, padding, sampling,
text, network, embeddings and norms never count, nor does a cache that prompts with a common prefix could share.

Memory has no single bandwidth: what fits into a cache is read several times faster. So the bandwidth is known for
several sizes of what is read repeatedly, and the one for the weights' own size counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from llama_engine.checkpoint.architecture import read_architecture
from transformers import LlamaConfig

Weights = Literal["fp32", "fp16", "bf16", "int8"]
BYTES: dict[Weights, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
"""Per value. In INT8 every row of a matrix also has a scale."""
WIDTHS: tuple[Weights, ...] = ("fp32", "fp16", "bf16", "int8")
"""Weight formats, from the widest to the narrowest."""


@dataclass(frozen=True)
class DeviceRates:
    """device: "cpu" or "cuda". threads: on a CPU.

    bandwidth: bytes per second, by the size in bytes of what is read repeatedly. operations: multiplications and
    additions per second in large square products, by the format of both factors; a format that this device's libraries
    can't multiply is absent.
    """

    device: str
    threads: int
    bandwidth: Mapping[int, float]
    operations: Mapping[Weights, float]

    def read(self, working_set: float) -> float:
        """Return an upper bound of the bytes per second for reading this many bytes repeatedly.

        Of the measured sizes, the next smaller one counts (the smallest, if there is none), or a larger one that was
        read faster: reading more is never faster, so that is noise.
        """
        next_smaller = max((size for size in self.bandwidth if size <= working_set), default=min(self.bandwidth))
        return max(rate for size, rate in self.bandwidth.items() if size >= next_smaller)

    def multiply(self, weights: Weights) -> float:
        """Return an upper bound of the operations per second in a product with weights of this format.

        Weights may be widened first, which is faster where the hardware has no fast product of the narrow format:
        bitsandbytes computes INT8 in FP32 on a CPU without AVX512. So the rate is the best of this format and all wider
        ones; widening itself counts as free.
        """
        usable = WIDTHS[: WIDTHS.index(weights) + 1]
        return max(rate for kind, rate in self.operations.items() if kind in usable)

    def to_json(self) -> dict[str, object]:
        """Return the rates for a result's file, to three digits; JSON has no numbers as keys."""
        return {
            "device": self.device,
            "threads": self.threads,
            "bandwidth": {str(size): float(f"{rate:.3g}") for size, rate in self.bandwidth.items()},
            "operations": {kind: float(f"{rate:.3g}") for kind, rate in self.operations.items()},
        }

    def describe(self) -> str:
        """Return the rates as one line."""
        read = ", ".join(f"{rate / 1e9:,.1f} at {size / 2**20:,.0f} MiB" for size, rate in self.bandwidth.items())
        products = ", ".join(f"{kind} {rate / 1e9:,.1f}" for kind, rate in self.operations.items())
        return f"{self.device}, {self.threads} thread(s): reads GB/s {read}; products, 10^9 operations/s: {products}"


@dataclass(frozen=True)
class Roofline:
    """The best possible. tokens_per_second: output tokens of the load. seconds: of the whole load."""

    tokens_per_second: float
    seconds: float
    bound_by: Literal["bandwidth", "operations"]

    def beside(self, tokens_per_second: float) -> dict[str, float | str]:
        """Return the entry "limit" of a measurement: the bound, and the share of it that these tokens/s are."""
        return {
            "tokens_per_second": round(self.tokens_per_second, 1),
            "fraction": round(tokens_per_second / self.tokens_per_second, 4),
            "bound_by": self.bound_by,
        }


def roofline(
    config: LlamaConfig,
    weights: Weights,
    rates: DeviceRates,
    sequences: int,
    requests: Sequence[int],
    prompt_tokens: int,
) -> Roofline:
    """Return the bound of a load on a device.

    weights: of the linear layers and the head. sequences: the largest number in a step. requests: the output tokens of
    each. prompt_tokens: of every request.
    """
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    architecture = read_architecture(config, "the model")
    queries, keys = (count * architecture.head_dim for count in (architecture.heads, architecture.kv_heads))
    # The cache around INT8 weights is in BF16 on a CPU and in FP16 on a GPU.
    cache: Weights = weights if weights != "int8" else "bf16" if rates.device == "cpu" else "fp16"
    # Per layer: queries and attention's output, keys and values; gate, up and down.
    matrices = layers * (2 * hidden * queries + 2 * hidden * keys + 3 * hidden * inner)
    head = hidden * config.vocab_size
    # In INT8 each output channel of a matrix has an FP32 scale.
    scales = layers * (queries + 2 * keys + hidden + 2 * inner + hidden) + config.vocab_size
    weight_bytes = (matrices + head) * BYTES[weights] + (4 * scales if weights == "int8" else 0)
    cached_bytes = layers * 2 * keys * BYTES[cache]
    # The first token of a request is the prefill's; with n of them, n - 1 are decoded, with p … p + n - 2 positions
    # cached.
    decoded = sum(requests) - len(requests)
    positions = sum((tokens - 1) * prompt_tokens + (tokens - 1) * (tokens - 2) // 2 for tokens in requests)
    context = positions / decoded if decoded else float(prompt_tokens)
    bandwidth = rates.read(weight_bytes + sequences * context * cached_bytes)
    reading = (-(-decoded // sequences) * weight_bytes + positions * cached_bytes) / bandwidth
    # A decoded token attends to the cached positions and itself, a prompt's to itself and all before it.
    prefill = len(requests) * prompt_tokens
    looks = prefill * (prompt_tokens + 1) // 2 + positions + decoded
    computing = 2 * (matrices * (prefill + decoded) + head * sum(requests)) / rates.multiply(weights)
    # Scores and sums; every query head has its own, also where heads share keys and values.
    computing += layers * 2 * 2 * queries * looks / rates.multiply(cache)
    seconds = max(reading, computing)
    return Roofline(
        tokens_per_second=sum(requests) / seconds,
        seconds=seconds,
        bound_by="bandwidth" if reading > computing else "operations",
    )
