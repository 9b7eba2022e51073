"""The overhead account: one load through a server, the bare engine and its passes alone, and the parts of each.

All answer the same requests with the same number of rows and take turns, so that a slow minute of the machine affects
all. The bare engine has every request from the start; the server gets twice as many at once as it has slots, so that
requests always wait there, too. In a result's file:

    runs      server, engine, slot_forward (the engine's passes through a model runner alone), timed_engine (with the
              stopwatch); tokens_per_second of the median
    steps     a decode step of all rows in the bare engine: means of the step and of its passes alone, and the time to
              read its weights and cached positions at the measured bandwidth, in milliseconds; the share of the step
              beyond its passes (sampling, texts, rows), and the step's share of the limit
    parts     the trees of three wholes: "bare engine", seconds of the timed run; "mean request", seconds at its
              client, and "cores", core seconds, both of the server's last run
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from perf.checkpoint import unquantized
from perf.overhead import passes
from perf.overhead.bare import TOKENIZATION, BareEngine, Run
from perf.overhead.served import processor_parts, request_parts, serve
from perf.overhead.stopwatch import flatten
from perf.roofline.physics import Costs
from perf.roofline.rates import DeviceRates, Weights
from perf.servers.triton import local_triton, read_back
from perf.workload import Mix, requests

VARIANT = "default"
MIX: Mix = "uniform"
QUANTIZATION = "int8"
SLOTS = 32
REQUESTS = 96
REPETITIONS = 2


def account(checkpoint: Path, threads: int, rates: DeviceRates, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure and return the account, with a server of its own. threads: for computing, on a CPU."""
    torch.set_num_threads(threads)
    asked = requests(checkpoint, MIX, REQUESTS)
    tokens = sum(one.output_tokens for one in asked)
    bare = BareEngine(checkpoint, QUANTIZATION, SLOTS, asked)
    say(f"warm-up, then the bare engine under the stopwatch: {REQUESTS} requests, {tokens:,} tokens")
    bare.run(SLOTS)
    timed, whole, noted = bare.split()
    environment = {"OMP_NUM_THREADS": str(threads), "LLAMA_QUANTIZATION": QUANTIZATION}
    environment |= {"LLAMA_SLOTS": str(SLOTS), "LLAMA_MAX_MODEL_LEN": str(bare.max_model_len)}
    engine, answered, alone = [], [], []
    with local_triton(variant=VARIANT, model=str(checkpoint), environment=environment) as server:
        settings = {"environment": environment, "variant": VARIANT, **read_back(server).to_json()}
        serve(server, asked[:SLOTS], 2 * SLOTS)
        for repetition in range(1, REPETITIONS + 1):
            say(f"bare engine, server, passes alone: {repetition} of {REPETITIONS}")
            engine.append(bare.run())
            answered.append(serve(server, asked, 2 * SLOTS))
            alone.append(passes.repeated(bare.checkpoint, bare.engine.plan.shape, noted, bare.settle))
    seconds = {
        "server": [one.seconds for one in answered],
        "engine": [one.seconds for one in engine],
        "slot_forward": [sum(one) for one in alone],
        "timed_engine": [timed.seconds],
    }
    parts = [
        *flatten(whole, tokens),
        *flatten(request_parts(answered[-1], whole.part(TOKENIZATION).seconds / REQUESTS), tokens / REQUESTS),
        *flatten(processor_parts(answered[-1]), tokens),
    ]
    load = {"mix": MIX, "requests": REQUESTS, "concurrency": 2 * SLOTS, "output_tokens": tokens, "slots": SLOTS}
    return {
        "settings": {"checkpoint": checkpoint.name, "quantization": QUANTIZATION, **load, "server": settings},
        "runs": {kind: {"tokens_per_second": round(tokens / median(its), 1)} for kind, its in seconds.items()},
        "steps": full_steps(bare, engine, noted, alone, rates),
        "parts": [asdict(part) for part in parts],
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
    positions = fmean(one.positions for one in runs[0].full_steps)
    steps = zip(*([one.seconds for one in run.full_steps] for run in runs), strict=True)
    step = fmean(map(min, steps))
    # The head's pass follows the decoder's.
    places = [place for place, one in enumerate(noted) if (one.method, one.rows) == ("decode", shape.slots)]
    alone = fmean(min(each[place] + each[place + 1] for each in repeated) for place in places)
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
