"""Memory against the memory plan: the peak under full load, and growth between steps.

An engine stays full of mixed rows (prompts of one token and of several chunks, penalties, top-p, early ends) for many
steps. The allocator's peak must stay within the plan's total, and the second half of the steps after a warm-up must
allocate no more than the first.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine
from llama_engine.model.loader import Checkpoint
from llama_engine.model.memory_plan import MemoryPlan, graph_reserve
from llama_engine.settings import Settings

from perf import workload
from perf.gpu.decoding import new_engine, proved, reset_peak
from perf.gpu.options import Amount

MIB = 1 << 20
LEFT = 64 << 10
"""Bytes by which the allocated memory between steps may differ; a leak of one tensor per step exceeds it."""


class Stretch(NamedTuple):
    """Some steps under full load. peak, left: bytes that PyTorch had allocated at most and at the end; 0 on a CPU."""

    steps: int
    ended: int
    errors: int
    peak: int
    left: int


def steady(checkpoint: Checkpoint, amount: Amount, graphs: bool = False) -> dict[str, object]:
    """Keep an engine full; on CUDA, compare its memory with the plan.

    graphs: with the steps as CUDA graphs; RuntimeError if they can't be captured.
    """
    device = checkpoint.info.device
    cuda = device.type == "cuda"
    _free(device)
    reset_peak(device)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    engine = new_engine(checkpoint, amount.max_model_len, amount.slots, graphs)
    holds = torch.cuda.memory_allocated(device) if cuda else 0
    free = _free(device)
    proved(engine, graphs)
    # Graphs own memory and driver nodes that PyTorch's figures don't include.
    graph_bytes = free - _free(device) if graphs else 0
    supply = _requests(checkpoint.config.vocab_size, engine.max_model_len, Settings().prefill_tokens)
    # Contexts grow to their full length in the first stretch, which is the warm-up of the other two.
    stretches = [_run(engine, supply, amount.steps // 3, amount.steady_s / 3, device) for _ in range(3)]
    failed, steps = sum(stretch.errors for stretch in stretches), sum(stretch.steps for stretch in stretches)
    found: dict[str, object] = {
        "plan": engine.plan.describe(),
        "decode_steps": engine.describe_decode(),
        "slots": amount.slots,
        "max_model_len": amount.max_model_len,
        "steps": steps,
        "asked_steps": amount.steps,
        "rows_ended": sum(stretch.ended for stretch in stretches),
        "errors": failed,
    }
    if not cuda:
        return {**found, "memory": "needs CUDA", "passed": failed == 0, "in_short": f"{steps} steps"}
    config = checkpoint.config
    sizes = config.hidden_size, config.intermediate_size, config.vocab_size, checkpoint.info.dtype.itemsize
    planned = graph_reserve(engine.plan.shape, *sizes)
    memory, flat, in_short = against_plan(engine.plan, stretches)
    found["memory"] = {
        "weights_mib": _mib(before),
        "engine_mib": _mib(holds - before),
        **({"graphs_mib": _mib(graph_bytes), "graphs_planned_mib": _mib(planned)} if graphs else {}),
        **memory,
        "reserved_mib": _mib(torch.cuda.max_memory_reserved(device)),
    }
    return {
        **found,
        "passed": flat and graph_bytes <= planned and failed == 0,
        "in_short": f"{in_short} in {steps:,} of {amount.steps:,} steps, {failed} errors",
    }


def against_plan(plan: MemoryPlan, stretches: Sequence[Stretch]) -> tuple[dict[str, object], bool, str]:
    """Compare the stretches' memory with the plan: the figures, whether it was within the plan and flat, in words."""
    _, first, second = stretches
    peak = max(stretch.peak for stretch in stretches)
    growth, left = second.peak - first.peak, second.left - first.left
    figures: dict[str, object] = {
        "planned_mib": {
            name: _mib(getattr(plan, name)) for name in ("weights", "cache", "sampling", "reserve", "total", "budget")
        },
        "peak_mib": [_mib(stretch.peak) for stretch in stretches],
        "left_allocated_mib": [_mib(stretch.left) for stretch in stretches],
        "share_of_plan": round(peak / plan.total, 4),
        "growth_mib": _mib(growth),
        "left_growth_bytes": left,
    }
    # Between steps the memory may differ by a row's tensor, and a pass over a longer span takes a little more.
    flat = peak <= plan.total and left <= LEFT and growth <= max(MIB // 2, plan.reserve // 50)
    return figures, flat, f"peak {_mib(peak):,.0f} of {_mib(plan.total):,.0f} MiB planned, grown by {left:,} bytes"


def _run(
    engine: Engine, supply: Iterator[GenerationRequest], steps: int, seconds: float, device: torch.device
) -> Stretch:
    reset_peak(device)
    done = ended = errors = 0
    until = time.monotonic() + seconds
    while done < steps and (not done or time.monotonic() < until):
        while engine.used_slots < engine.slots:
            engine.add(engine.sequence(next(supply)))
        step = engine.step()
        done, ended, errors = done + 1, ended + len(step.finished), errors + step.errors
    if device.type != "cuda":
        return Stretch(done, ended, errors, 0, 0)
    torch.cuda.synchronize(device)
    peak, left = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    return Stretch(done, ended, errors, peak, left)


def _requests(vocabulary: int, max_model_len: int, prefill_tokens: int) -> Iterator[GenerationRequest]:
    """Yield mixed requests without end; every eighth prompt is longer than a prefill chunk."""
    randomness = random.Random(11)
    lengths = itertools.cycle(workload.lengths("uniform", 64, min(workload.MEAN_OUTPUT, max_model_len // 8)))
    for number, length in enumerate(lengths):
        room, chunked = max_model_len - length, number % 8 == 7
        longest = min(room, prefill_tokens + 100 if chunked else workload.PROMPT_TOKENS)
        size = longest if chunked else randomness.randint(1, longest)
        sampled = number % 3 == 1
        yield GenerationRequest(
            prompt="",
            prompt_tokens=tuple(randomness.randrange(5, vocabulary) for _ in range(size)),
            max_tokens=length,
            min_tokens=length,
            temperature=0.8 if sampled else 0.0,
            top_p=0.9 if sampled else 1.0,
            repetition_penalty=1.1 if number % 5 == 2 else 1.0,
            seed=number,
        )


def _free(device: torch.device) -> int:
    """Return the device's free bytes after PyTorch has released its cache; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _mib(count: int) -> float:
    return round(count / MIB, 2)
