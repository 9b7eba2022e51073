"""Decoding throughput of the engine without Triton, and of generate(): waves of rows that begin and end together.

A wave of 32 rows with prompts of 100 tokens and 200 new tokens each is the article's load without a server. Throughput
counts everything from the first prompt to the last token; the step time is the median of steps with all rows and
without prefill.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.cuda_graphs import unsupported_reason
from llama_engine.engine import Engine
from llama_engine.model.loader import Checkpoint
from llama_engine.model.model_runner import SPAN_BUCKET
from llama_engine.sequence import Completion
from llama_engine.settings import Settings

from perf.gpu.models import Precision
from perf.gpu.timing import settle
from perf.load.summary import percentiles
from perf.roofline import physics
from perf.roofline.rates import DeviceRates

WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Wave:
    """`rows` rows at once, each with a prompt of `prompt` tokens and `output` new ones."""

    rows: int
    prompt: int
    output: int

    @property
    def context(self) -> int:
        """Positions per row, in whole buckets of the attention's span."""
        return -(-(self.prompt + self.output) // SPAN_BUCKET) * SPAN_BUCKET

    def prompts(self, vocabulary: int) -> list[tuple[int, ...]]:
        """Return the prompts, all different."""
        return [
            tuple(5 + (17 * row + place) % (vocabulary - 5) for place in range(self.prompt)) for row in range(self.rows)
        ]

    def requests(self, vocabulary: int, output: int) -> list[GenerationRequest]:
        """Return greedy requests for exactly `output` tokens."""
        return [
            GenerationRequest(prompt="", prompt_tokens=prompt, max_tokens=output, min_tokens=output)
            for prompt in self.prompts(vocabulary)
        ]


def engine(
    checkpoint: Checkpoint, precision: Precision, wave: Wave, rates: DeviceRates, graphs: bool = False
) -> dict[str, object]:
    """Run a wave through an engine of as many slots. Raises RuntimeError if a row isn't completed.

    graphs: with the steps as CUDA graphs; RuntimeError if they can't be captured.
    """
    if graphs:
        refuse_without(checkpoint)
    device, vocabulary = checkpoint.info.device, checkpoint.config.vocab_size
    settings = Settings(cuda_graphs="on" if graphs else "off")
    made = Engine(replace(checkpoint, max_model_len=wave.context), settings, wave.rows)
    # As a server does at start: what compiles at its first use must not compile during the measurement.
    proving_s = proved(made, graphs)
    _run(made, wave.requests(vocabulary, min(WARM_UP_TOKENS, wave.output)))
    settle(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    steps = _run(made, wave.requests(vocabulary, wave.output))
    settle(device)
    return {
        "measured": "the engine, without a server",
        **_wave(checkpoint, precision, wave, steps.seconds, rates),
        "first_token_ms": percentiles(steps.first_tokens),
        **_step(checkpoint, precision, wave, steps.full, rates),
        **_memory(device),
        "steps": made.describe_decode(),
        "proving_s": proving_s,
        "texts": steps.texts,
    }


def refuse_without(checkpoint: Checkpoint) -> None:
    """Raise RuntimeError if the checkpoint's steps can't be CUDA graphs."""
    if reason := unsupported_reason(checkpoint):
        raise RuntimeError(reason)


def proved(made: Engine, graphs: bool) -> float:
    """Let the engine prove itself; return the seconds. Raises RuntimeError if the steps should be graphs but aren't.

    A server only logs that a step can't be captured; here it would be a measurement under a wrong name.
    """
    began = time.perf_counter()
    made.warm_up()
    if graphs and not made.uses_cuda_graphs:
        raise RuntimeError("the steps can't be captured as CUDA graphs; the log has the reason")
    return round(time.perf_counter() - began, 2)


def stock(checkpoint: Checkpoint, precision: Precision, wave: Wave, rates: DeviceRates) -> dict[str, object]:
    """Run a wave through transformers' generate() as one batch. Raises RuntimeError if the lengths are wrong."""
    device = checkpoint.info.device
    ids = torch.tensor(wave.prompts(checkpoint.config.vocab_size), device=device)

    def generate(tokens: int) -> float:
        settle(device)
        began = time.perf_counter()
        with torch.inference_mode():
            # Its self is a protocol that the class doesn't meet.
            found: object = checkpoint.model.generate(  # type: ignore[misc]
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
            )
        settle(device)
        assert isinstance(found, torch.Tensor), f"generate() returned a {type(found).__name__}"
        if tuple(found.shape) != (wave.rows, wave.prompt + tokens):
            raise RuntimeError(f"generate() returned {tuple(found.shape)}, not {wave.rows} rows of {tokens} new tokens")
        return time.perf_counter() - began

    generate(min(WARM_UP_TOKENS, wave.output))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return {
        "measured": "transformers' generate(), one batch",
        **_wave(checkpoint, precision, wave, generate(wave.output), rates),
        **_memory(device),
    }


@dataclass(frozen=True)
class _Steps:
    """seconds: of the wave. full: of each step with all rows and no prefill. first_tokens: since the start.

    texts: a digest of all rows' texts.
    """

    seconds: float
    full: Sequence[float]
    first_tokens: Sequence[float]
    texts: str


def _run(made: Engine, requests: Sequence[GenerationRequest]) -> _Steps:
    began = time.perf_counter()
    rows = [made.sequence(request) for request in requests]
    for row in rows:
        made.add(row)
    full: list[float] = []
    first: list[float] = []
    before = began
    while made.used_slots:
        step = made.step()
        now = time.perf_counter()
        if step.decoded == len(rows) and not step.prefill_tokens:
            full.append(now - before)
        first += [now - began] * (sum(row.num_output_tokens > 0 for row in rows) - len(first))
        before = now
    outcomes = [row.result for row in rows]
    good = [outcome for outcome in outcomes if isinstance(outcome, Completion)]
    if len(good) != len(rows):
        wrong = next(outcome for outcome in outcomes if not isinstance(outcome, Completion))
        raise RuntimeError(f"{len(rows) - len(good)} of {len(rows)} rows failed, the first with {wrong!r}")
    digest = hashlib.sha256("\0".join(completion.text for completion in good).encode())
    return _Steps(before - began, full, first, digest.hexdigest())


def _wave(
    checkpoint: Checkpoint, precision: Precision, wave: Wave, seconds: float, rates: DeviceRates
) -> dict[str, object]:
    rate = wave.rows * wave.output / seconds
    limit = physics.roofline(
        checkpoint.config, precision.weights, rates, wave.rows, [wave.output] * wave.rows, wave.prompt
    )
    # The same load without end: a server's steady state.
    steady = physics.roofline(
        checkpoint.config, precision.weights, rates, wave.rows, [wave.output] * wave.rows, wave.prompt, steady=True
    )
    beside = limit.beside(rate)
    return {
        **precision.to_json(),
        "loaded": checkpoint.info.describe(),
        "rows": wave.rows,
        "prompt_tokens": wave.prompt,
        "output_tokens": wave.output,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(rate, 1),
        "requests_per_second": round(rate / wave.output, 3),
        "limit": {**beside, "steady_requests_per_second": round(steady.tokens_per_second / wave.output, 2)},
        "in_short": f"{rate:,.0f} tokens/s, {rate / wave.output:,.2f} requests/s, {float(beside['fraction']):.1%} of "
        "the limit",
    }


def _step(
    checkpoint: Checkpoint, precision: Precision, wave: Wave, full: Sequence[float], rates: DeviceRates
) -> dict[str, object]:
    if not full:
        return {"step_ms": None}
    limit = physics.roofline(
        checkpoint.config, precision.weights, rates, wave.rows, [wave.output] * wave.rows, wave.prompt
    )
    median = statistics.median(full)
    return {
        "step_ms": percentiles(full),
        "step_limit_ms": round(1e3 * limit.step_seconds, 4),
        "step_share_of_limit": round(limit.step_seconds / median, 4),
    }


def _memory(device: torch.device) -> dict[str, object]:
    if device.type != "cuda":
        return {}
    return {"vram_mib": round(torch.cuda.max_memory_allocated(device) / 2**20, 1)}
