"""Memory against the memory plan: the peak under full load, growth between steps, and recovery from scarcity.

An engine stays full of mixed rows (prompts of one token and of several chunks, penalties, top-p, early ends) for many
steps. The allocator's peak must stay within the plan's total, and the second half of the steps after a warm-up must
allocate no more than the first. Then the allocator is capped a little above its present size, so that prompts that fit
one by one don't fit together: every row must still be answered.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from engine.forward_passes import ForwardPass, watching
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine
from llama_engine.model.loader import Checkpoint
from llama_engine.model.memory_plan import MemoryPlan, graph_reserve
from llama_engine.sequence import Completion
from llama_engine.settings import Settings

from perf import workload
from perf.gpu.decoding import proved, refuse_without

MIB = 1 << 20
LEFT = 64 << 10
"""Bytes by which the allocated memory between steps may differ; a leak of one tensor per step exceeds it."""
PROMPTS = 8192
"""Prompt tokens in one prefill pass when memory is scarce."""


@dataclass(frozen=True)
class Extent:
    """How much is done. steps, seconds: whichever ends first. scarce_rows: rows whose prompts share a prefill pass.

    scarce_mib: their allowance above the engine's memory, less than they need; None for a model that is too small for
    a cap: a hook refuses its passes.
    """

    slots: int
    max_model_len: int
    steps: int
    seconds: float
    scarce_rows: int
    scarce_mib: int | None


def steady(checkpoint: Checkpoint, extent: Extent, graphs: bool = False) -> dict[str, object]:
    """Keep an engine full; on CUDA, compare its memory with the plan.

    graphs: with the steps as CUDA graphs; RuntimeError if they can't be captured.
    """
    if graphs:
        refuse_without(checkpoint)
    device = checkpoint.info.device
    cuda = device.type == "cuda"
    _reset_peak(device)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    settings = Settings(cuda_graphs="on" if graphs else "off")
    engine = Engine(replace(checkpoint, max_model_len=extent.max_model_len), settings, extent.slots)
    holds = torch.cuda.memory_allocated(device) if cuda else 0
    free = _free(device)
    proved(engine, graphs)
    # Graphs own memory and driver nodes that PyTorch's figures don't include.
    graph_bytes = free - _free(device) if graphs else 0
    supply = _requests(checkpoint, engine, settings)
    # Contexts grow to their full length in the first stretch, which is the warm-up of the other two.
    stretches = [_run(engine, supply, extent.steps // 3, extent.seconds / 3, device) for _ in range(3)]
    failed, steps = sum(stretch.errors for stretch in stretches), sum(stretch.steps for stretch in stretches)
    found: dict[str, object] = {
        "plan": engine.plan.describe(),
        "decode_steps": engine.describe_decode(),
        "slots": extent.slots,
        "max_model_len": extent.max_model_len,
        "steps": steps,
        "asked_steps": extent.steps,
        "rows_ended": sum(stretch.ended for stretch in stretches),
        "errors": failed,
    }
    if not cuda:
        return {**found, "memory": "needs CUDA", "passed": failed == 0, "in_short": f"{steps} steps"}
    config = checkpoint.config
    sizes = (config.hidden_size, config.intermediate_size, config.vocab_size)
    graphs_planned = graph_reserve(engine.plan.shape, *sizes)
    memory, flat, in_short = against_plan(engine.plan, stretches)
    found["memory"] = {
        "weights_mib": _mib(before),
        "engine_mib": _mib(holds - before),
        **({"graphs_mib": _mib(graph_bytes), "graphs_planned_mib": _mib(graphs_planned)} if graphs else {}),
        **memory,
        "reserved_mib": _mib(torch.cuda.max_memory_reserved(device)),
    }
    return {
        **found,
        "passed": flat and graph_bytes <= graphs_planned and failed == 0,
        "in_short": f"{in_short} in {steps:,} of {extent.steps:,} steps, {failed} errors",
    }


def _reset_peak(device: torch.device) -> None:
    """Return cached memory to CUDA and restart the peak; on a CPU, nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


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


def scarce(checkpoint: Checkpoint, extent: Extent) -> dict[str, object]:
    """Prefill prompts that don't fit together: every row must be answered, and the engine keep working afterwards."""
    device = checkpoint.info.device
    width = min(PROMPTS // extent.scarce_rows, extent.max_model_len // 2)
    settings = Settings(prefill_tokens=PROMPTS)
    engine = Engine(replace(checkpoint, max_model_len=extent.max_model_len), settings, extent.scarce_rows)
    requests = [
        GenerationRequest(prompt="", prompt_tokens=(5 + row,) * width, max_tokens=4, min_tokens=4)
        for row in range(extent.scarce_rows)
    ]
    engine.generate(requests[:1])
    if device.type == "cuda" and extent.scarce_mib is not None:
        how = f"the allocator's bound at {extent.scarce_mib} MiB above what the engine holds"
        errors, answered = _bounded(engine, requests, device, extent.scarce_mib * MIB)
    else:
        how = "passes of more than a quarter of the tokens refused by a hook"
        with watching(checkpoint, _refusing(width * extent.scarce_rows // 4)), _quiet():
            errors, answered = _answered(engine, requests)
    afterwards = _answered(engine, requests)
    passed = errors > 0 and answered == len(requests) and afterwards == (0, len(requests))
    return {
        "how": how,
        "rows": len(requests),
        "prompt_tokens": width,
        "errors": errors,
        "answered": answered,
        "errors_afterwards": afterwards[0],
        "answered_afterwards": afterwards[1],
        "passed": passed,
        "in_short": f"{errors} passes refused, {answered} of {len(requests)} rows answered, then {afterwards[1]} with "
        f"{afterwards[0]} errors",
    }


@dataclass(frozen=True)
class Stretch:
    """peak, left: bytes that PyTorch had allocated at most and at the end; 0 without CUDA."""

    steps: int
    ended: int
    errors: int
    peak: int
    left: int


def _run(
    engine: Engine, supply: Iterator[GenerationRequest], steps: int, seconds: float, device: torch.device
) -> Stretch:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
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
    return Stretch(
        done, ended, errors, torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    )  # fmt: skip


def _requests(checkpoint: Checkpoint, engine: Engine, settings: Settings) -> Iterator[GenerationRequest]:
    """Yield mixed requests without end; every eighth prompt is longer than a prefill chunk."""
    randomness = random.Random(11)
    vocabulary = checkpoint.config.vocab_size
    mean = min(workload.MEAN_OUTPUT, engine.max_model_len // 8)
    lengths = itertools.cycle(workload.lengths("uniform", 64, mean))
    for number, length in enumerate(lengths):
        room = engine.max_model_len - length
        longest = min(room, settings.prefill_tokens + 100) if number % 8 == 7 else min(room, workload.PROMPT_TOKENS)
        size = longest if number % 8 == 7 else randomness.randint(1, longest)
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


def _bounded(engine: Engine, requests: list[GenerationRequest], device: torch.device, more: int) -> tuple[int, int]:
    """Run the requests with PyTorch's allocator capped; the device's own settings stay."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + more) / total, device)
    try:
        with _quiet():
            return _answered(engine, requests)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _answered(engine: Engine, requests: list[GenerationRequest]) -> tuple[int, int]:
    """Run the requests; return the numbers of failed passes and of completed rows."""
    rows = [engine.sequence(request) for request in requests]
    for row in rows:
        engine.add(row)
    errors = 0
    while engine.used_slots:
        errors += engine.step().errors
    return errors, sum(isinstance(row.result, Completion) for row in rows)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log of the provoked errors, a page each; they are counted."""
    log = logging.getLogger("llama_engine.engine")
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = False


def _refusing(most: int) -> Callable[[ForwardPass], None]:
    def refuse(one: ForwardPass) -> None:
        if one.tokens.numel() > most:
            raise torch.OutOfMemoryError(f"{one.tokens.numel()} tokens don't fit, {most} would")

    return refuse


def _free(device: torch.device) -> int:
    """Return the device's free bytes after PyTorch has released its cache."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _mib(count: int) -> float:
    return round(count / MIB, 2)
