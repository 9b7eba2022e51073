"""The engine's steps in one process: their cost beyond the model's `forward`, and the bound on their prompt tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine
from llama_engine.model.loader import Checkpoint, load_checkpoint
from llama_engine.settings import Settings
from transformers import DynamicCache

SAMPLING = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
}
PROMPT = tuple(range(3, 403))
DECODING = 7


def step_costs(quantizations: list[str], repetitions: int) -> list[dict[str, object]]:
    """Measure rows 1, 8, 32 at contexts that begin at 64 and 320 tokens, greedy and sampled.

    Three durations per point, each the median of many: the engine's whole step (positions, mask, forward, head,
    sampling, reading the tokens, stop conditions), the forward and head of that step alone on the slot cache, and
    transformers' own `forward` of the same model with its DynamicCache, one token per row, without sampling. They
    alternate, and their contexts grow by a token each time. A step must read all weights and the cached positions of
    every row once; the difference to the forward alone is the engine's overhead.
    """
    points: list[dict[str, object]] = []
    for quantization in quantizations:
        settings = Settings.parse({"quantization": quantization, "prefill_tokens": "65536"}, {})
        checkpoint = load_checkpoint(settings, torch.device("cpu"))
        for rows in (1, 8, 32):
            for context in (64, 320):
                for sampling, parameters in SAMPLING.items():
                    point = {"weights": quantization, "rows": rows, "context": context, "sampling": sampling}
                    room = checkpoint.max_model_len - context
                    engine = Engine(checkpoint, settings, rows)
                    _decoding(engine, rows, tuple(range(3, 3 + context)), room, parameters)
                    points.append(point | _times(checkpoint, engine, rows, context, repetitions))
    return points


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
    _decoding(engine, DECODING, (5, 6, 7), 400, {})
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


def _decoding(engine: Engine, rows: int, prompt: tuple[int, ...], tokens: int, sampling: dict[str, float]) -> None:
    """Add rows of exactly that many tokens, and step until all of them decode."""
    for row in range(rows):
        request = GenerationRequest(
            prompt="",
            prompt_tokens=prompt,
            max_tokens=tokens,
            min_tokens=tokens,
            seed=row,
            **sampling,  # type: ignore[arg-type]  # float parameters by name
        )
        engine.add(engine.sequence(request))
    while engine.step().decoded < rows:
        pass


def _times(checkpoint: Checkpoint, engine: Engine, rows: int, context: int, repetitions: int) -> dict[str, object]:
    model = engine._model  # the measurement looks inside on purpose: what a step does without the rest of the engine
    batch = engine._batch
    cache = DynamicCache(config=checkpoint.config)
    tokens = torch.full((rows, 1), 5)
    with torch.inference_mode():
        checkpoint.model(torch.full((rows, context), 5), past_key_values=cache)

        def transformers_forward() -> None:
            checkpoint.model(tokens, past_key_values=cache)

        def forward() -> None:
            span = model.decode_span(max(sequence.num_cached for sequence in batch.sequences))
            model.logits(model.decode(0, batch.tokens[:rows], batch.positions[:rows], span))

        def whole_step() -> None:
            assert engine.step().decoded == rows, "a row has ended: fewer repetitions, please"

        # Alternating, so that a slow moment of the machine hits all three.
        actions: list[Callable[[], None]] = [forward, whole_step, transformers_forward]
        taken: list[list[float]] = [[] for _ in actions]
        for _ in range(repetitions):
            for times, action in zip(taken, actions, strict=True):
                began = time.perf_counter()
                action()
                times.append(time.perf_counter() - began)
    bare, step, reference = (statistics.median(times) for times in taken)
    return {
        "step_ms": round(step * 1e3, 3),
        "forward_ms": round(bare * 1e3, 3),
        "transformers_forward_ms": round(reference * 1e3, 3),
        "overhead_over_forward": round(step / bare - 1, 4),
        "overhead_over_transformers": round(step / reference - 1, 4),
    }
