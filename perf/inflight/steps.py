"""The engine's steps in one process: the bound on their prompt tokens."""

from __future__ import annotations

import statistics
import time

import torch
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine
from llama_engine.model.loader import load_checkpoint
from llama_engine.settings import Settings

PROMPT = tuple(range(3, 403))
DECODING = 7


def prefill_bounds(bounds: list[int], newcomers: int) -> list[dict[str, object]]:
    """Measure the effect of the bound on prompt tokens per step, on the embedded checkpoint in INT8.

    Seven rows decode while prompts of 400 tokens arrive, each as soon as the previous one has its first token. The gap
    between two tokens of a decoding row is the duration of a step, and prefill adds to it; so a smaller bound cuts the
    longest gaps and makes new prompts wait for more steps.
    """
    return [_prefill_bound(bound, newcomers) for bound in bounds]


def _prefill_bound(bound: int, newcomers: int) -> dict[str, object]:
    settings = Settings.parse({"prefill_tokens": str(bound)}, {})
    engine = Engine(load_checkpoint(settings, torch.device("cpu")), settings, DECODING + 1)
    _decoding(engine)
    gaps: list[float] = []
    firsts: list[float] = []
    while len(firsts) < newcomers:
        entered = time.perf_counter()
        newcomer = engine.sequence(GenerationRequest(prompt="", prompt_tokens=PROMPT, max_tokens=1))
        engine.add(newcomer)
        finished = False
        while not finished:
            began = time.perf_counter()
            step = engine.step()
            gaps.append(time.perf_counter() - began)
            assert step.decoded == DECODING, "a decoding row has ended: fewer newcomers, please"
            finished = newcomer in step.finished
        firsts.append(time.perf_counter() - entered)
    gaps.sort()
    return {
        "prefill_tokens": bound,
        "prompt_tokens": len(PROMPT),
        "decoding_rows": DECODING,
        "steps": len(gaps),
        "gap_p50_ms": round(1e3 * statistics.median(gaps), 2),
        "gap_p99_ms": round(1e3 * gaps[int(0.99 * (len(gaps) - 1))], 2),
        "gap_max_ms": round(1e3 * gaps[-1], 2),
        "time_to_first_token_p50_ms": round(1e3 * statistics.median(firsts), 2),
    }


def _decoding(engine: Engine) -> None:
    """Add rows, and step until all of them decode."""
    for _ in range(DECODING):
        request = GenerationRequest(prompt="", prompt_tokens=(5, 6, 7), max_tokens=400, min_tokens=400)
        engine.add(engine.sequence(request))
    while engine.step().decoded < DECODING:
        pass
