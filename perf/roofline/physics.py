"""The least time that a load can take on a device, with any server.

A decode step samples one token per row; it must read every weight once and every cached position of its rows once, and
do two operations per weight and row:

    t >= (weight bytes + rows x context x bytes per position) / bandwidth
    t >= (2 x parameters + attention) x rows / matrix rate

The larger one is the bound: bandwidth for few rows, operations for many. More rows in a step share one reading of the
weights; that is why batching pays until operations are the bound. Over a whole load, at most `rows` requests in a step:

    passes     >= the longest output: its first token comes from the prefill, each other one from a step
               >= 1 + (all output tokens - 1 a request) / rows; in steady state instead of both, without the 1
    bytes      >= passes x weights + every cached position at every step of its row
    operations >= 2 x parameters x (prompt tokens + decoded tokens), the head once per output token, and attention
    seconds    >= the larger of bytes / bandwidth and operations / matrix rate

In INT8 an operation multiplies or adds 8-bit values, and a weight costs two for each row, as in W8A8. Exact INT8 makes
four for a row with two terms. Rates are in the same operations: the compiled kernels' rate counts both terms.

So prefill costs its operations here, and no reading of weights that steps could not share: a server that mixes both in
one pass can't exceed this bound either. What never counts: Python, launching kernels, padding, sampling, text, network;
embeddings (looked up, one line a token) and norms. Prompts with a common prefix could share its cache; no server here
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llama_engine.checkpoint.architecture import read_architecture
from transformers import LlamaConfig

from perf.roofline.rates import BYTES, DeviceRates, Weights


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


class Costs:
    """The costs of a Llama's passes: bytes to read, and operations.

    weight_bytes: bytes of weights that a pass reads. cached_bytes: bytes that a step reads for each cached position of
    a row.
    """

    def __init__(
        self, config: LlamaConfig, weights: Weights, rates: DeviceRates, floats: Weights | None = None
    ) -> None:
        """floats: of head and cache around INT8 weights, as W8A8 has them; None for the engine's own."""
        around, head = weights, weights
        if weights == "int8":
            # The engine's cache is in BF16 on a CPU and in FP16 on a GPU; its head is in INT8.
            around = floats or ("bf16" if rates.device == "cpu" else "fp16")
            head = weights if floats is None else around
        hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
        architecture = read_architecture(config, "the model")
        queries, keys = (count * architecture.head_dim for count in (architecture.heads, architecture.kv_heads))
        # Per layer: queries and attention's output, keys and values; gate, up and down.
        self._matrices = layers * (2 * hidden * queries + 2 * hidden * keys + 3 * hidden * inner)
        self._head = hidden * config.vocab_size
        # In INT8 each output row of a matrix has an FP32 scale.
        rows = layers * (queries + 2 * keys + hidden + 2 * inner + hidden) if weights == "int8" else 0
        rows += config.vocab_size if head == "int8" else 0
        self.weight_bytes = self._matrices * BYTES[weights] + 4 * rows + self._head * BYTES[head]
        self.cached_bytes = layers * 2 * keys * BYTES[around]
        # Scores and sums; every query head has its own, also where heads share keys and values.
        self._attended = layers * 2 * 2 * queries
        self._matrix_rate, self._head_rate, self._rate = map(rates.multiply, (weights, head, around))

    def computing(self, tokens: int, samples: int, positions: int) -> float:
        """Return the seconds of the operations for that many tokens, which attend to these positions in all.

        samples: of the tokens, those that need the head, as another one follows.
        """
        matrices = 2 * self._matrices * tokens / self._matrix_rate + 2 * self._head * samples / self._head_rate
        return matrices + self._attended * positions / self._rate


def roofline(
    config: LlamaConfig,
    weights: Weights,
    rates: DeviceRates,
    rows: int,
    requests: Sequence[int],
    prompt_tokens: int,
    steady: bool = False,
    floats: Weights | None = None,
) -> Roofline:
    """Return the bound of a load on a device.

    rows: largest number of requests in a step. requests: the output tokens of each. prompt_tokens: of every request.
    steady: of a load in steady state, instead of one that begins and ends. floats: as in `Costs`.
    """
    costs = Costs(config, weights, rates, floats)
    # The first token of a request is the prefill's; with n of them, n - 1 are decoded, with p … p + n - 2 positions
    # cached.
    decoded = sum(requests) - len(requests)
    positions = sum((tokens - 1) * prompt_tokens + (tokens - 1) * (tokens - 2) // 2 for tokens in requests)
    context = positions / decoded if decoded else float(prompt_tokens)
    step_bytes = costs.weight_bytes + rows * context * costs.cached_bytes
    bandwidth = rates.read(step_bytes)
    passes = -(-decoded // rows) if steady else max(1 + -(-decoded // rows), max(requests))
    reading = (passes * costs.weight_bytes + positions * costs.cached_bytes) / bandwidth
    # A decoded token attends to the cached positions and itself, a prompt's to itself and all before it.
    prefill = len(requests) * prompt_tokens
    looks = prefill * (prompt_tokens + 1) // 2
    computing = costs.computing(prefill + decoded, sum(requests), looks + positions + decoded)
    seconds = max(reading, computing)
    return Roofline(
        tokens_per_second=sum(requests) / seconds,
        seconds=seconds,
        bound_by="bandwidth" if reading > computing else "operations",
    )
