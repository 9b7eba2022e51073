"""Decode steps with LoRA adapters, in this process: an engine without adapters and three with eight take turns.

Every sequence decodes from the first turn to the last, so the engines' steps do equal work. A turn's time is its
fastest step's, because others on a shared host make some steps several times as long.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

from llama_engine.engine.engine import Engine
from llama_engine.model.loader import LoadedModel, load_checkpoint
from llama_engine.model.precision import choose_device
from llama_engine.settings import Settings

from perf.adapters import lora_adapters, with_adapters
from perf.bench.lora import MIXES, MODELS
from perf.checkpoint import described
from perf.environment import StealTime, device
from perf.load.workload import PROMPT_TOKENS, engine_requests
from perf.lora_report import AdapterMix, cost
from perf.results_file import Results

TURNS, STEPS = 40, 5
TOKENS = TURNS * STEPS + 50
"""Of a sequence. Some are generated while other prompts are prefilled."""


def measure(results: Results, users: Sequence[int], turns: int = TURNS) -> None:
    """Add to the results what a step of so many sequences takes, by each model, and what adapters cost of it."""
    for model, (make, _) in MODELS.items():
        checkpoint = with_adapters(model, make)
        values = {"model": str(checkpoint), "max_model_len": str(PROMPT_TOKENS + TOKENS + 50)}
        values |= {"prefix_cache": "off", "speculation": "off"}
        plain = Settings.parse(values, {})
        adapters = Settings.parse(values | {"lora_adapters": ", ".join(lora_adapters(model))}, {})
        loaded = load_checkpoint(plain, choose_device(plain.device, None if device().startswith("CPU") else 0))
        for count in users:
            steal = StealTime()
            without = _decoding(loaded, plain, count, "none")
            engines = [without, *(_decoding(loaded, adapters, count, mix) for mix in MIXES)]
            seconds: list[list[float]] = [[] for _ in engines]
            for turn in range(turns):
                # There and back, against drift.
                for number in sorted(range(len(engines)), reverse=turn % 2 == 1):
                    seconds[number].append(min(_step(engines[number]) for _ in range(STEPS)))
            assert all(engine.num_sequences == count for engine in engines), "a sequence has ended"
            measurement = {
                "server": "steps",
                "title": "steps in process",
                "weights": "INT8",
                "model": described(checkpoint),
                "settings": {"decode_steps": without.describe_decode().removeprefix("decode steps: ")},
                "load": {"concurrency": count},
                "step_ms": round(1e3 * statistics.median(seconds[0]), 3),
                "costs": {mix: cost(seconds[0], times) for mix, times in zip(MIXES, seconds[1:], strict=True)},
                "stolen_share": round(steal.share(), 4),
            }
            results.add(f"lora/{model}/steps/{count}", measurement)
            print(f"lora/{model}/steps/{count}: {measurement['step_ms']} ms, {measurement['costs']}", flush=True)
            del without, engines


def _decoding(loaded: LoadedModel, settings: Settings, count: int, mix: AdapterMix) -> Engine:
    """Return an engine whose sequences, of the mix's adapters in turn, have their prompts in the cache."""
    engine = Engine(loaded, settings, count)
    adapters = {"": None, **{adapter.name: adapter for adapter in engine.adapters.loaded()}}
    for request, name in zip(engine_requests(loaded, [TOKENS] * count), cycle(MIXES[mix]), strict=False):
        engine.add(engine.builder.build(replace(request, adapter=adapters[name])))
    while engine.step().prefill_tokens:
        pass
    return engine


def _step(engine: Engine) -> float:
    began = time.perf_counter()
    engine.step()
    return time.perf_counter() - began
