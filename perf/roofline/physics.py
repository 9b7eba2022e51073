"""The least time that a load can take on a device, whoever serves it.

Decoding chooses one token a row in a step, and a step must read every weight once and every cached position of its rows
once, and do two operations for each weight and row:

    t >= (weight bytes + rows x context x bytes per position) / bandwidth
    t >= (2 x parameters + attention) x rows / matrix rate

The larger one is the bound: bandwidth for few rows, operations for many. More rows in a step share one reading of the
weights; that is all that batching is, and why it pays until operations are the bound.

Over a whole load of requests, at most `rows` of them in a step:

    passes     >= the longest output: its first token comes from reading the prompt, each other one from a step
               >= 1 + (all output tokens - 1 a request) / rows
    bytes      >= passes x weights + every cached position at every step of its row
    operations >= 2 x parameters x (prompt tokens + decoded tokens), the head once an output token, and attention
    seconds    >= the larger of bytes / bandwidth and operations / matrix rate

For a rate that was taken while the load was full, before its rows run out, the first two lines don't hold, and the
passes are (all output tokens - 1 a request) / rows (`steady`).

So reading prompts costs its operations here, and no reading of weights that steps could not share: a server that mixes
both in one pass, as some do, can't pass this limit either. What never counts: Python, starting kernels, padding,
sampling, text, network. A prompt that another one begins like could share its cache; nobody here does.

Llama-2-7B (13.2 GB of FP16 without the embedding, 6.74 GB in INT8 with the head in FP16, 0.5 MiB of cache a position),
200 tokens in a context of 300: on an A10G (600 GB/s) a request alone takes at least 4.5 s in FP16, and 32 rows make at
most 5.3 requests/s in FP16 and 8.2 in INT8; on an H100 (3.0 TB/s) 26.3 and 40.8.

Weights are counted as they are kept (`shape.py`), the bandwidth is the one for as many bytes as a step reads
(`rates.py`). Knows nothing about measuring and about servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import LlamaConfig

from perf.roofline.rates import DeviceRates, Weights
from perf.roofline.shape import Formats, LlamaShape


@dataclass(frozen=True)
class Limit:
    """The best that is possible. tokens_per_second: output tokens of the load. seconds: of the whole load.

    step_seconds, bytes_per_step, operations_per_step: of a step with all rows taken, at the load's mean context.
    prefill_seconds: what reading the prompts alone takes. bound_by: what bounds the whole load.
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
        """Return the entry "limit" of a measurement that came to so many output tokens per second."""
        return {
            "tokens_per_second": round(self.tokens_per_second, 1),
            "fraction": round(tokens_per_second / self.tokens_per_second, 4),
            "bound_by": self.bound_by,
        }


@dataclass(frozen=True)
class _Work:
    """Operations, apart by what they are done in: products with the layers' matrices, and all else."""

    matrices: int
    computing: int

    def seconds(self, formats: Formats, rates: DeviceRates) -> float:
        return self.matrices / rates.multiply(formats.weights) + self.computing / rates.multiply(formats.computing)


def best(
    config: LlamaConfig,
    weights: Weights,
    rates: DeviceRates,
    rows: int,
    requests: Sequence[int],
    prompt_tokens: int,
    steady: bool = False,
) -> Limit:
    """Return the limit of a load on a device. Raises ValueError for a load without requests or tokens.

    rows: at most so many requests in a step. requests: the output tokens of each. prompt_tokens: of every request.
    steady: of a load that goes on like this, instead of one that begins and ends.
    """
    if rows < 1 or prompt_tokens < 1 or not requests or min(requests) < 1:
        raise ValueError(
            f"rows is {rows}, prompt_tokens {prompt_tokens}, output tokens {list(requests)}: each must be at least 1"
        )
    shape, formats = LlamaShape.of(config), Formats.of(weights, rates.device)
    # The first token of a request is the prompt's; with n of them, n - 1 are decoded, with p … p + n - 2 positions
    # cached.
    decoded = sum(requests) - len(requests)
    positions = sum((tokens - 1) * prompt_tokens + (tokens - 1) * (tokens - 2) // 2 for tokens in requests)
    context = positions / decoded if decoded else float(prompt_tokens)
    step_bytes = bytes_per_step(config, weights, rates.device, rows, context)
    bandwidth = rates.read(step_bytes)
    step = _decode(shape, rows, round(rows * context))
    prefill = _prefill(shape, len(requests), prompt_tokens)
    decode = _decode(shape, decoded, positions)
    passes = -(-decoded // rows) if steady else max(1 + -(-decoded // rows), max(requests))
    reading = (passes * shape.weight_bytes(formats) + positions * shape.cached_bytes(formats)) / bandwidth
    computing = decode.seconds(formats, rates) + prefill.seconds(formats, rates)
    seconds = max(reading, computing)
    return Limit(
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
    """Return what a decode step of so many rows must read, each with so many positions in the cache."""
    shape, formats = LlamaShape.of(config), Formats.of(weights, device)
    return shape.weight_bytes(formats) + round(rows * context * shape.cached_bytes(formats))


def _decode(shape: LlamaShape, tokens: int, positions: int) -> _Work:
    """Return the work of so many tokens, each decoded alone, that look at so many positions between them."""
    # A token also looks at itself.
    return _Work(2 * shape.matrices * tokens, 2 * shape.head * tokens + shape.attended * (positions + tokens))


def _prefill(shape: LlamaShape, prompts: int, tokens: int) -> _Work:
    """Return the work of reading so many prompts of so many tokens: each looks at itself and all before it."""
    looks = tokens * (tokens + 1) // 2
    return _Work(2 * shape.matrices * prompts * tokens, (2 * shape.head + shape.attended * looks) * prompts)
