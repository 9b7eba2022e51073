"""Correctness of the engine on this device, with the embedded checkpoint.

FP32 by tokens, as in the tests on a CPU and with their helpers; FP16 and INT8 by logits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

import torch
from engine.engines import engine_of, with_tokens_as_text
from engine.exactness import LONGEST, Tally, compare, mix, pool
from engine.greedy import GreedyReference
from llama_engine.model.loader import Checkpoint, load_checkpoint
from llama_engine.settings import Settings

from perf.gpu import logits
from perf.gpu.decoding import proved, refuse_without
from perf.gpu.models import Precision

TIES_A_THOUSAND = 1

_ENGINES: Sequence[tuple[int, Mapping[str, str]]] = ((8, {}), (3, {}), (8, {"prefill_tokens": "256"}))
"""Slots and settings as in the tests: with few slots rows wait, with small prefills they are added in groups."""


def embedded(precision: Precision, device: torch.device, fused: bool = False) -> Checkpoint:
    """Load the embedded checkpoint in a precision.

    fused: with the engine's own kernels; RuntimeError if one of them isn't used.
    """
    if fused and device.type != "cuda":
        raise RuntimeError("the fused kernels are a GPU's")
    plain = precision.weights != "int8"
    parameters = {
        "quantization": "none" if plain else "int8",
        **({"dtype": {"fp32": "float32", "fp16": "float16"}[precision.weights]} if plain else {}),
        **({} if precision.threshold is None else {"int8_threshold": str(precision.threshold)}),
        **({"kernels": "fused"} if fused else {}),
    }
    loaded = load_checkpoint(Settings.parse(parameters, {}), device)
    if fused and (loaded.kernels.attention is None or (loaded.kernels.few_rows is None and not plain)):
        raise RuntimeError(f"the checkpoint has {loaded.kernels.describe()} only; the log has the reason")
    return loaded


def exactness(checkpoint: Checkpoint, batches: int, seconds: float, graphs: bool = False) -> dict[str, object]:
    """Compare tokens with generate()'s on each prompt alone, in `batches` batches or for `seconds`.

    graphs: with the steps as CUDA graphs; RuntimeError if they can't be captured.
    """
    if graphs:
        refuse_without(checkpoint)
    randomness, tally = random.Random(200), Tally()
    references = {1.0: GreedyReference(checkpoint, LONGEST), 1.3: GreedyReference(checkpoint, LONGEST, 1.3)}
    prompts = pool(checkpoint.tokenizer, min(60, 2 * batches), randomness)
    exposed = with_tokens_as_text(checkpoint)
    settings = {"cuda_graphs": "on"} if graphs else {}
    engines = [engine_of(exposed, slots, **settings, **more) for slots, more in _ENGINES]
    if graphs:
        for made in engines:
            proved(made, graphs)
    until = time.monotonic() + seconds
    done, wrong = 0, ""
    while done < batches and not wrong and (done < 1 or time.monotonic() < until):
        penalty = 1.3 if done % 4 == 3 else 1.0
        requests = mix(prompts, randomness.randint(1, 8), randomness, penalty)
        try:
            compare(randomness.choice(engines), requests, references, tally)
        except AssertionError as error:
            wrong = str(error)
        done += 1
    passed = not wrong and 1000 * tally.ties <= max(TIES_A_THOUSAND * tally.requests, 1000)
    return {
        "what": "greedy FP32 tokens against generate() on the prompt alone",
        "decode_steps": engines[0].describe_decode(),
        "batches": done,
        **vars(tally),
        **({"wrong": wrong} if wrong else {}),
        "passed": passed,
        "in_short": f"{tally.requests} requests, {tally.tokens} tokens, {tally.ties} ties: {_verdict(passed)}",
    }


def tolerance(
    precision: Precision,
    device: torch.device,
    exact: list[torch.Tensor],
    rows: int,
    steps: int,
    fused: bool = False,
) -> Mapping[str, object]:
    """Compare a precision's logits with those of the same weights alone, and with `exact`: FP32's, alone.

    fused: with the engine's own kernels.
    """
    checkpoint = embedded(precision, device, fused)
    given = logits.texts(checkpoint, rows, steps)
    decoded = logits.through_slots(checkpoint, given, steps)
    same = logits.distance(logits.alone(checkpoint, given, steps), decoded)
    reference = logits.distance(exact, decoded)
    # The fused product rounds no activations, so its bounds are those of 16 bits.
    same_bounds = logits.SAME_WEIGHTS["fp16" if fused else precision.weights]
    reference_bounds = logits.AGAINST_FP32[precision.weights]
    passed = same.within(same_bounds) and reference.within(reference_bounds)
    return {
        **precision.to_json(),
        "loaded": checkpoint.info.describe(),
        "kernels": checkpoint.kernels.describe(),
        "rows": rows,
        "steps": steps,
        "against_same_weights_alone": same.to_json(same_bounds),
        "against_fp32_alone": reference.to_json(reference_bounds),
        "passed": passed,
        "in_short": f"KL {same.divergence:.2g} nats from the same weights alone, {reference.divergence:.2g} from FP32: "
        f"{_verdict(passed)}",
    }


def exact_logits(checkpoint: Checkpoint, rows: int, steps: int) -> list[torch.Tensor]:
    """Return FP32's logits of `tolerance`'s texts, each alone."""
    return logits.alone(checkpoint, logits.texts(checkpoint, rows, steps), steps)


def _verdict(passed: bool) -> str:
    return "passed" if passed else "NOT PASSED"
