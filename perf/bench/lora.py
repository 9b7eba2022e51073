"""Loads whose requests name LoRA adapters: none, one, or eight in turn; and decode steps with them, in this process.

For the steps an engine without adapters and three with eight take turns. Every sequence decodes from the first turn to
the last, so the engines' steps do equal work. A turn's time is its fastest step's, because others on a shared host make
some steps several times as long.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from timeit import repeat

from llama_engine.engine.engine import Engine
from llama_engine.model.loader import LoadedModel, load_checkpoint
from llama_engine.model.precision import choose_device
from llama_engine.settings import Settings

from perf.adapters import NAMES, lora_adapters, with_adapters
from perf.checkpoint import TINY_LLAMA, default_checkpoint, described, random_checkpoint
from perf.environment import StealTime, device
from perf.load.protocols import Request
from perf.load.workload import MEAN_OUTPUT, PROMPT_TOKENS, Load, engine_requests, passages
from perf.lora_report import AdapterMix, cost
from perf.results_file import Results

MIXES: Mapping[AdapterMix, Sequence[str]] = {"none": [""], "one": NAMES[:1], "eight": NAMES}
"""The adapters that a load's requests name in turn."""
MODELS: Mapping[str, tuple[Callable[[], Path], int]] = {
    "small": (default_checkpoint, MEAN_OUTPUT),
    "large": (partial(random_checkpoint, TINY_LLAMA), MEAN_OUTPUT // 2),
}
"""What makes a model's checkpoint, and the mean of its output tokens."""
ROUNDS = 5
USERS = (1, 8, 32)
SECONDS = 10.0
TURNS, STEPS = 40, 5
TOKENS = TURNS * STEPS + 50
"""Of a sequence of the steps. Some are generated while other prompts are prefilled."""


def load(model: str, mix: AdapterMix, users: int, number: int, mean: int) -> Load:
    """Return a load of the other tables' requests. number: of the round. mean: output tokens of a request."""
    key = f"lora/{model}/{mix}/{users}/{number}"

    def named(checkpoint: Path) -> tuple[list[Request], int]:
        requests, warmup = passages(key, "uniform", users, 512, mean).requests(checkpoint)
        adapters = zip(requests, cycle(MIXES[mix]), strict=False)
        return [replace(request, adapter=adapter) for request, adapter in adapters], warmup

    return Load(key, mix, users, named, SECONDS, round=number)


def measure_steps(results: Results, users: Sequence[int]) -> None:
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
            for turn in range(TURNS):
                # There and back, against drift.
                for number in sorted(range(len(engines)), reverse=turn % 2 == 1):
                    seconds[number].append(min(repeat(engines[number].step, number=1, repeat=STEPS)))
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
