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
from typing import NamedTuple

import torch
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.cuda_graphs import unsupported_reason
from llama_engine.engine import Engine
from llama_engine.model.loader import Checkpoint
from llama_engine.sequence import Completion
from llama_engine.settings import Settings
from transformers import LlamaForCausalLM

from perf.gpu.models import Precision
from perf.load.summary import percentiles
from perf.overhead.stopwatch import settle
from perf.roofline import physics
from perf.roofline.rates import DeviceRates

WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Wave:
    """`rows` rows at once, each with a prompt of `prompt` tokens and `output` new ones, in a precision."""

    precision: Precision
    rates: DeviceRates
    rows: int
    prompt: int
    output: int

    def prompts(self, vocabulary: int) -> list[tuple[int, ...]]:
        """Return the prompts, all different."""
        return [
            tuple(5 + (17 * row + place) % (vocabulary - 5) for place in range(self.prompt)) for row in range(self.rows)
        ]

    def figures(self, checkpoint: Checkpoint, seconds: float, full_steps: Sequence[float] = ()) -> dict[str, object]:
        """Return the wave's throughput beside the limit, and the time of steps with all rows."""
        config, weights, rates = checkpoint.config, self.precision.weights, self.rates
        lengths = [self.output] * self.rows
        limit = physics.roofline(config, weights, rates, self.rows, lengths, self.prompt)
        rate = self.rows * self.output / seconds
        beside = limit.beside(rate)
        found = {
            **self.precision.to_json(),
            "loaded": checkpoint.info.describe(),
            "rows": self.rows,
            "prompt_tokens": self.prompt,
            "output_tokens": self.output,
            "seconds": round(seconds, 4),
            "tokens_per_second": round(rate, 1),
            "requests_per_second": round(rate / self.output, 3),
            "limit": beside,
            "in_short": f"{rate:,.0f} tokens/s, {rate / self.output:,.2f} requests/s, "
            f"{float(beside['fraction']):.1%} of the limit",
        }
        if full_steps:
            found["step_ms"] = percentiles(full_steps)
            found["step_limit_ms"] = round(1e3 * limit.step_seconds, 4)
            found["step_share_of_limit"] = round(limit.step_seconds / statistics.median(full_steps), 4)
        if checkpoint.info.device.type == "cuda":
            found["vram_mib"] = round(torch.cuda.max_memory_allocated(checkpoint.info.device) / 2**20, 1)
        return found


def engine(checkpoint: Checkpoint, wave: Wave, graphs: bool = False) -> dict[str, object]:
    """Run a wave through an engine of as many slots. Raises RuntimeError if a row isn't completed.

    graphs: with the steps as CUDA graphs; RuntimeError if they can't be captured.
    """
    made = new_engine(checkpoint, wave.prompt + wave.output, wave.rows, graphs)
    # As a server does at start: what compiles at its first use must not compile during the measurement.
    proving_s = proved(made, graphs)
    prompts = wave.prompts(checkpoint.config.vocab_size)
    _run(made, prompts, min(WARM_UP_TOKENS, wave.output))
    reset_peak(checkpoint.info.device)
    found = _run(made, prompts, wave.output)
    return {
        "measured": "the engine, without a server",
        **wave.figures(checkpoint, found.seconds, found.full),
        "first_token_ms": percentiles(found.first_tokens),
        "steps": made.describe_decode(),
        "proving_s": proving_s,
        "texts": found.texts,
    }


def new_engine(checkpoint: Checkpoint, max_model_len: int, slots: int, graphs: bool) -> Engine:
    """Return an engine; graphs: with its steps as CUDA graphs, RuntimeError if the checkpoint's can't be."""
    if graphs and (reason := unsupported_reason(checkpoint)):
        raise RuntimeError(reason)
    settings = Settings(cuda_graphs="on" if graphs else "off")
    return Engine(replace(checkpoint, max_model_len=max_model_len), settings, slots)


def proved(made: Engine, graphs: bool) -> float:
    """Let the engine prove itself; return the seconds. Raises RuntimeError if the steps should be graphs but aren't.

    A server only logs that a step can't be captured; here it would be a measurement under a wrong name.
    """
    began = time.perf_counter()
    made.warm_up()
    if graphs and not made.uses_cuda_graphs:
        raise RuntimeError("the steps can't be captured as CUDA graphs; the log has the reason")
    return round(time.perf_counter() - began, 2)


def reset_peak(device: torch.device) -> None:
    """Wait for the device and restart the allocator's peak."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def stock(checkpoint: Checkpoint, model: LlamaForCausalLM, wave: Wave) -> dict[str, object]:
    """Run a wave through transformers' generate() as one batch. Raises RuntimeError if the lengths are wrong.

    model: the checkpoint's, as transformers computes it.
    """
    device = checkpoint.info.device
    ids = torch.tensor(wave.prompts(checkpoint.config.vocab_size), device=device)

    def generate(tokens: int) -> float:
        settle(device)
        began = time.perf_counter()
        with torch.inference_mode():
            # Its self is a protocol that the class doesn't meet.
            found: object = model.generate(  # type: ignore[misc]
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
    reset_peak(device)
    seconds = generate(wave.output)
    return {"measured": "transformers' generate(), one batch", **wave.figures(checkpoint, seconds)}


class _Steps(NamedTuple):
    """Seconds: of the wave, of each step with all rows and no prefill, to each first token. texts: a digest."""

    seconds: float
    full: Sequence[float]
    first_tokens: Sequence[float]
    texts: str


def _run(made: Engine, prompts: Sequence[tuple[int, ...]], output: int) -> _Steps:
    """Answer the prompts with exactly `output` tokens each, greedily."""
    began = time.perf_counter()
    rows = [
        made.sequence(GenerationRequest(prompt="", prompt_tokens=prompt, max_tokens=output, min_tokens=output))
        for prompt in prompts
    ]
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
    good = [row.result for row in rows if isinstance(row.result, Completion)]
    if len(good) != len(rows):
        wrong = next(row.result for row in rows if not isinstance(row.result, Completion))
        raise RuntimeError(f"{len(rows) - len(good)} of {len(rows)} rows failed, the first with {wrong!r}")
    digest = hashlib.sha256("\0".join(completion.text for completion in good).encode())
    return _Steps(before - began, full, first, digest.hexdigest())
