"""The cost of a decode step beyond the model's bare `forward`, in one process, at the same rows and positions.

Three durations per point, each the median of many: the engine's whole step (positions, mask, forward, head, sampling,
reading the tokens, stop conditions), the forward and head of that step alone on the slot cache, and transformers' own
`forward` of the same model with its DynamicCache, one token per row, without sampling. They alternate, and their
contexts grow by a token each time. A step must read all weights and the cached positions of every row once; the
difference to the forward alone is the engine's overhead.
"""

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


def measure(quantizations: list[str], repetitions: int) -> list[dict[str, object]]:
    """Measure rows 1, 8, 32 at contexts that begin at 64 and 320 tokens, greedy and sampled."""
    points: list[dict[str, object]] = []
    for quantization in quantizations:
        settings = Settings.parse({"quantization": quantization, "prefill_tokens": "65536"}, {})
        checkpoint = load_checkpoint(settings, torch.device("cpu"))
        for rows in (1, 8, 32):
            for context in (64, 320):
                for sampling in SAMPLING:
                    point = {"weights": quantization, "rows": rows, "context": context, "sampling": sampling}
                    engine = _running(checkpoint, settings, rows, context, sampling)
                    points.append(point | _times(checkpoint, engine, rows, context, repetitions))
    return points


def _running(checkpoint: Checkpoint, settings: Settings, rows: int, context: int, sampling: str) -> Engine:
    """Return an engine with `rows` rows after their prefill."""
    engine = Engine(checkpoint, settings, rows)
    room = checkpoint.max_model_len - context
    for row in range(rows):
        request = GenerationRequest(
            prompt="",
            prompt_tokens=tuple(range(3, 3 + context)),
            max_tokens=room,
            min_tokens=room,
            seed=row,
            **SAMPLING[sampling],  # type: ignore[arg-type]  # float parameters by name
        )
        engine.add(engine.sequence(request))
    while engine.step().decoded < rows:
        pass
    return engine


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
        bare, step, reference = _medians([forward, whole_step, transformers_forward], repetitions)
    return {
        "step_ms": round(step * 1e3, 3),
        "forward_ms": round(bare * 1e3, 3),
        "transformers_forward_ms": round(reference * 1e3, 3),
        "overhead_over_forward": round(step / bare - 1, 4),
        "overhead_over_transformers": round(step / reference - 1, 4),
    }


def _medians(actions: list[Callable[[], object]], repetitions: int) -> list[float]:
    taken: list[list[float]] = [[] for _ in actions]
    for _ in range(repetitions):
        for times, action in zip(taken, actions, strict=True):
            began = time.perf_counter()
            action()
            times.append(time.perf_counter() - began)
    return [statistics.median(times) for times in taken]
