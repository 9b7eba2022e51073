"""The overhead account: one load through a server, the bare engine and the bare forward pass, and the parts of each.

All answer the same requests with the same number of rows and take turns, so that a slow minute of the machine affects
all. The bare engine has every request from the start; the server gets at least twice as many at once as it has slots,
so that requests always wait there, too. In a result's file:

    runs      server, engine, slot_forward (the engine's passes through its model runner), forward (through
              transformers' forward, without mask and indexed writes), timed_engine; tokens_per_second of the median
    ratios    of tokens per second, X_over_Y; timed_engine_over_engine is the stopwatch's cost
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

from perf.load.protocols import Request
from perf.overhead import passes
from perf.overhead.bare import TOKENIZATION, BareEngine, Run
from perf.overhead.processes import MODEL
from perf.overhead.served import Served, processor_parts, request_parts, serve
from perf.overhead.stopwatch import Node, flatten
from perf.servers.triton import local_triton, read_back
from perf.workload import MEAN_OUTPUT, Mix, requests

SLOTS = 32
VARIANT = "default"
REPETITIONS = 2

_RATIOS = (("server", "engine"), ("engine", "slot_forward"), ("engine", "forward"), ("timed_engine", "engine"))


class _Turn(NamedTuple):
    engine: Run
    served: Served
    slot_forward: float
    forward: float


def account(
    checkpoint: Path,
    quantization: str,
    mix: Mix,
    concurrency: int,
    count: int,
    threads: int,
    *,
    slots: int = SLOTS,
    mean: int = MEAN_OUTPUT,
    repetitions: int = REPETITIONS,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure and return the account, with a server of its own. Raises ValueError for a load that leaves slots empty.

    quantization: the setting's value. threads: for computing, on a CPU. mean: output tokens of a request.
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
            say(f"bare engine, server, bare forward: {repetition} of {repetitions}")
            turns.append(_turn(bare, noted, server, asked, concurrency))
    return {"settings": settings, **_results(turns, timed, tokens), "parts": _parts(turns[-1].served, whole, tokens)}


def _refuse_empty_slots(slots: int, concurrency: int, count: int) -> None:
    if not 2 * slots <= concurrency <= count:
        raise ValueError(
            f"concurrency is {concurrency} and requests {count}; with {slots} slots concurrency must be at least "
            f"{2 * slots}, and the requests as many as that"
        )


def _turn(
    bare: BareEngine, noted: Sequence[passes.Pass], server: LocalTriton, asked: Sequence[Request], concurrency: int
) -> _Turn:
    model = bare.checkpoint, bare.engine.plan.shape, noted, bare.settle
    run, served = bare.run(), serve(server, asked, concurrency)
    return _Turn(run, served, passes.through_slots(*model), passes.through_forward(*model))


def _results(turns: Sequence[_Turn], timed: Run, tokens: int) -> dict[str, object]:
    """Return `runs` and `ratios`. processor_seconds: of the process that computes, where measured."""
    taken: dict[str, Sequence[Run]] = {
        "server": [Run(turn.served.seconds, turn.served.processor_seconds[MODEL]) for turn in turns],
        "engine": [turn.engine for turn in turns],
        "slot_forward": [Run(turn.slot_forward) for turn in turns],
        "forward": [Run(turn.forward) for turn in turns],
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


def _parts(served: Served, whole: Node, tokens: int) -> list[dict[str, object]]:
    tokenization = whole.part(TOKENIZATION).seconds / served.requests
    parts = [
        *flatten(whole, tokens),
        *flatten(request_parts(served, tokenization), tokens / served.requests),
        *flatten(processor_parts(served), tokens),
    ]
    return [asdict(part) for part in parts]
