"""The overhead account: one load through a server, the bare engine and the bare forward pass, and the parts of each.

All answer the same requests with the same number of rows and take turns, so that a slow minute of the machine affects
all. The bare engine has every request from the start; the server gets at least twice as many at once as it has slots,
so that requests always wait there, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypedDict

import torch
from triton_local.server import LocalTriton

from perf.load.protocols import Request
from perf.overhead.bare import BareEngine, Run, Split
from perf.overhead.probes import TOKENIZATION
from perf.overhead.processes import MODEL
from perf.overhead.served import Served, processor_parts, request_parts, serve
from perf.overhead.stopwatch import flatten
from perf.report.results import Part
from perf.servers.triton import local_triton, read_back
from perf.workload import MEAN_OUTPUT, Mix, requests

SLOTS = 32
VARIANT = "default"
REPETITIONS = 2


class RunsJSON(TypedDict):
    """One kind of run. processor_seconds: of the process that computes, where measured."""

    seconds: list[float]
    processor_seconds: list[float]
    tokens_per_second: float


class Account(TypedDict):
    """An account in a result file.

    runs: server, engine, slot_forward (the engine's passes through its model runner), forward (through transformers'
    forward, without mask and indexed writes), timed_engine. tokens_per_second: of the median run.
    ratios: of tokens per second, X_over_Y; timed_engine_over_engine is the stopwatch's cost.
    parts: the trees of three wholes: "bare engine", seconds of the timed run; "mean request", seconds at its client,
    and "cores", core seconds, both of the server's last run.
    """

    settings: dict[str, object]
    runs: dict[str, RunsJSON]
    ratios: dict[str, float]
    parts: list[dict[str, object]]


@dataclass
class _Turns:
    """The results of the repetitions."""

    engine: list[Run] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    slot_forward: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)


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
) -> Account:
    """Measure and return the account, with a server of its own. Raises ValueError for a load that leaves slots empty.

    quantization: the setting's value. threads: for computing, on a CPU. mean: output tokens of a request.
    """
    _check_load(slots, concurrency, count)
    torch.set_num_threads(threads)
    asked = requests(checkpoint, mix, count, mean)
    tokens = sum(one.output_tokens for one in asked)
    bare = BareEngine(checkpoint, quantization, slots, asked)
    say(f"warm-up, then the bare engine under the stopwatch: {count} requests, {tokens:,} tokens")
    bare.run(slots)
    split = bare.split()
    environment = {"OMP_NUM_THREADS": str(threads), "LLAMA_QUANTIZATION": quantization}
    environment |= {"LLAMA_SLOTS": str(slots), "LLAMA_MAX_MODEL_LEN": str(bare.max_model_len)}
    with local_triton(VARIANT, checkpoint, environment) as server:
        runs_with = {"variant": VARIANT, **read_back(server).to_json()}
        serve(server, asked[:slots], concurrency)
        turns = _in_turns(server, bare, split, asked, concurrency, repetitions, say)
    runs = _runs(turns, split, tokens)
    return {
        "settings": {
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
            "server": runs_with,
        },
        "runs": runs,
        "ratios": _ratios(runs),
        "parts": _parts(turns.served[-1], split),
    }


def _check_load(slots: int, concurrency: int, count: int) -> None:
    """Raise ValueError for a load that leaves slots empty."""
    if not 2 * slots <= concurrency <= count:
        raise ValueError(
            f"concurrency is {concurrency} and requests {count}; with {slots} slots concurrency must be at least "
            f"{2 * slots}, and the requests as many as that"
        )


def _in_turns(
    server: LocalTriton,
    bare: BareEngine,
    split: Split,
    asked: Sequence[Request],
    concurrency: int,
    repetitions: int,
    say: Callable[[str], None],
) -> _Turns:
    turns = _Turns()
    for repetition in range(1, repetitions + 1):
        say(f"bare engine, server, bare forward: {repetition} of {repetitions}")
        turns.engine.append(bare.run())
        turns.served.append(serve(server, asked, concurrency))
        turns.slot_forward.append(bare.through_slots(split.passes))
        turns.forward.append(bare.through_forward(split.passes))
    return turns


def _runs(turns: _Turns, split: Split, tokens: int) -> dict[str, RunsJSON]:
    def of(seconds: list[float], processor: list[float]) -> RunsJSON:
        return {
            "seconds": [round(value, 3) for value in seconds],
            "processor_seconds": [round(value, 3) for value in processor],
            "tokens_per_second": round(tokens / statistics.median(seconds), 1),
        }

    return {
        "server": of([run.seconds for run in turns.served], [run.processor_seconds[MODEL] for run in turns.served]),
        "engine": of([run.seconds for run in turns.engine], [run.processor_seconds for run in turns.engine]),
        "slot_forward": of(turns.slot_forward, []),
        "forward": of(turns.forward, []),
        "timed_engine": of([split.run.seconds], [split.run.processor_seconds]),
    }


def _ratios(runs: dict[str, RunsJSON]) -> dict[str, float]:
    pairs = (("server", "engine"), ("engine", "slot_forward"), ("engine", "forward"), ("timed_engine", "engine"))
    return {
        f"{one}_over_{other}": round(runs[one]["tokens_per_second"] / runs[other]["tokens_per_second"], 4)
        for one, other in pairs
    }


def _parts(served: Served, split: Split) -> list[dict[str, object]]:
    tokenization = split.whole.part(TOKENIZATION).seconds / served.requests
    parts: list[Part] = [
        *flatten(split.whole, split.run.output_tokens),
        *flatten(request_parts(served, tokenization), served.output_tokens / served.requests),
        *flatten(processor_parts(served), served.output_tokens),
    ]
    return [asdict(part) for part in parts]
