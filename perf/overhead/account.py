"""The overhead account: one load through a server, the bare engine and its passes alone, and the parts of each.

All answer the same requests with the same number of rows and take turns, so that a slow minute of the machine affects
all. The bare engine has every request from the start; the server gets at least twice as many at once as it has slots,
so that requests always wait there, too. In a result's file:

    runs      server, engine, slot_forward (the engine's passes through a model runner alone), timed_engine;
              tokens_per_second of the median
    ratios    of tokens per second, X_over_Y; timed_engine_over_engine is the stopwatch's cost
    steps     a decode step of all rows in the bare engine: means of the step and of its passes alone, and the time to
              read its weights and cached positions at the measured bandwidth, in milliseconds; the share of the step
              beyond its passes (sampling, texts, rows), and the step's share of the limit
    parts     the trees of three wholes: "bare engine", seconds of the timed run; "mean request", seconds at its
              client, and "cores", core seconds, both of the server's last run
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton_local.server import LocalTriton

from perf.checkpoint import unquantized
from perf.load.protocols import Request
from perf.overhead import passes
from perf.overhead.bare import TOKENIZATION, BareEngine, Run
from perf.overhead.processes import MODEL
from perf.overhead.served import Served, processor_parts, request_parts, serve
from perf.overhead.stopwatch import Node, flatten
from perf.roofline.physics import Costs
from perf.roofline.rates import DeviceRates, Weights
from perf.servers.triton import local_triton, read_back
from perf.workload import MEAN_OUTPUT, Mix, requests

SLOTS = 32
VARIANT = "default"
REPETITIONS = 2

_RATIOS = (("server", "engine"), ("engine", "slot_forward"), ("timed_engine", "engine"))


class _Turn(NamedTuple):
    """passes: the seconds of each repeated pass."""

    engine: Run
    served: Served
    passes: Sequence[float]


def account(
    checkpoint: Path,
    quantization: str,
    mix: Mix,
    concurrency: int,
    count: int,
    threads: int,
    rates: DeviceRates,
    *,
    slots: int = SLOTS,
    mean: int = MEAN_OUTPUT,
    repetitions: int = REPETITIONS,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure and return the account, with a server of its own. Raises ValueError for a load that leaves slots empty.

    quantization: the setting's value. threads: for computing, on a CPU. rates: the device's. mean: output tokens of a
    request.
    """
    _refuse_empty_slots(slots, concurrency, count)
    torch.set_num_threads(threads)
    asked = requests(checkpoint, mix, count, mean)
    tokens = sum(one.output_tokens for one in asked)
    bare = BareEngine(checkpoint, quantization, slots, asked)
    say(f"warm-up, then the bare engine under the stopwatch: {count} requests, {tokens:,} tokens")
    bare.run(slots)
    timed, whole, noted = bare.split()
    environment = {"OMP_NUM_THREADS": str(threads), "LLAMA_QUANTIZATION": quantization}
    environment |= {"LLAMA_SLOTS": str(slots), "LLAMA_MAX_MODEL_LEN": str(bare.max_model_len)}
    turns = []
    settings: dict[str, object] = {
        "checkpoint": checkpoint.name,
        "quantization": quantization,
        "mix": mix,
        "requests": count,
        "concurrency": concurrency,
        "output_tokens": tokens,
        "threads": threads,
        "slots": slots,
        "max_model_len": bare.max_model_len,
        "repetitions": repetitions,
    }
    with local_triton(variant=VARIANT, model=str(checkpoint), environment=environment) as server:
        settings["server"] = {"variant": VARIANT, **read_back(server).to_json()}
        serve(server, asked[:slots], concurrency)
        for repetition in range(1, repetitions + 1):
            say(f"bare engine, server, passes alone: {repetition} of {repetitions}")
            turns.append(_turn(bare, noted, server, asked, concurrency))
    return {
        "settings": settings,
        **_results(turns, timed, tokens),
        "steps": full_steps(bare, [one.engine for one in turns], noted, [one.passes for one in turns], rates),
        "parts": _parts(turns[-1].served, whole, tokens),
    }


def _refuse_empty_slots(slots: int, concurrency: int, count: int) -> None:
    if not 2 * slots <= concurrency <= count:
        raise ValueError(
            f"concurrency is {concurrency} and requests {count}; with {slots} slots concurrency must be at least "
            f"{2 * slots}, and the requests as many as that"
        )


def _turn(
    bare: BareEngine, noted: Sequence[passes.Pass], server: LocalTriton, asked: Sequence[Request], concurrency: int
) -> _Turn:
    run, served = bare.run(), serve(server, asked, concurrency)
    return _Turn(run, served, passes.repeated(bare.checkpoint, bare.engine.plan.shape, noted, bare.settle))


def _results(turns: Sequence[_Turn], timed: Run, tokens: int) -> dict[str, object]:
    """Return `runs` and `ratios`. processor_seconds: of the process that computes, where measured."""
    taken: dict[str, Sequence[Run]] = {
        "server": [Run(turn.served.seconds, turn.served.processor_seconds[MODEL]) for turn in turns],
        "engine": [turn.engine for turn in turns],
        "slot_forward": [Run(sum(turn.passes)) for turn in turns],
        "timed_engine": [timed],
    }
    rates = {kind: round(tokens / statistics.median(run.seconds for run in made), 1) for kind, made in taken.items()}
    runs = {
        kind: {
            "seconds": [round(run.seconds, 3) for run in made],
            "processor_seconds": [round(run.processor, 3) for run in made if run.processor is not None],
            "tokens_per_second": rates[kind],
        }
        for kind, made in taken.items()
    }
    return {
        "runs": runs,
        "ratios": {f"{one}_over_{other}": round(rates[one] / rates[other], 4) for one, other in _RATIOS},
    }


def full_steps(
    bare: BareEngine,
    runs: Sequence[Run],
    noted: Sequence[passes.Pass],
    repeated: Sequence[Sequence[float]],
    rates: DeviceRates,
) -> dict[str, object]:
    """Return `steps` of the bare engine's runs. repeated: the seconds of each noted pass, once for each run.

    Every run makes the same steps, so the fastest of each leaves out what else the machine did. Raises StatisticsError
    if no step decoded in every slot.
    """
    shape, config = bare.engine.plan.shape, bare.checkpoint.config
    positions = statistics.fmean(one.positions for one in runs[0].full_steps)
    steps = zip(*([one.seconds for one in run.full_steps] for run in runs), strict=True)
    step = statistics.fmean(map(min, steps))
    # The head's pass follows the decoder's.
    places = [place for place, one in enumerate(noted) if (one.method, one.rows) == ("decode", shape.slots)]
    alone = statistics.fmean(min(each[place] + each[place + 1] for each in repeated) for place in places)
    weights: Weights = "int8" if "int8" in bare.checkpoint.info.linears else unquantized()
    size = Costs(config, weights, rates).weight_bytes + positions * shape.bytes_per_token
    limit = size / rates.read(size)
    return {
        "rows": shape.slots,
        "step_ms": round(1e3 * step, 3),
        "passes_ms": round(1e3 * alone, 3),
        "rest_share": round(1 - alone / step, 4),
        "bytes": round(size),
        "limit_ms": round(1e3 * limit, 3),
        "share_of_limit": round(limit / step, 4),
    }


def _parts(served: Served, whole: Node, tokens: int) -> list[dict[str, object]]:
    tokenization = whole.part(TOKENIZATION).seconds / served.requests
    parts = [
        *flatten(whole, tokens),
        *flatten(request_parts(served, tokenization), tokens / served.requests),
        *flatten(processor_parts(served), tokens),
    ]
    return [asdict(part) for part in parts]
