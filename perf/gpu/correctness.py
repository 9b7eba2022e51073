"""Correctness of the engine on this device, with the embedded checkpoint: FP32 by tokens, FP16 and INT8 by logits.

Tokens are compared as in the tests on a CPU, with their helpers. Logits: those of decoding through slots with those of
a forward pass over each text alone. The text is given token by token, so both see the same tokens at every position.
Two comparisons per precision: with the same weights alone, for the effect of slots, padding, neighbours and shapes; and
with transformers' own model in FP32, which adds the effect of the precision itself.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from engine.engines import engine_of, with_tokens_as_text
from engine.greedy import LONGEST, GreedyReference, Tally, compare, mix, pool
from engine.oracle import oracle
from engine.prompts import random_prompt
from llama_engine.cuda_graphs import unsupported_reason
from llama_engine.model.loader import Checkpoint, load_checkpoint
from llama_engine.model.model_runner import Chunk
from llama_engine.settings import Settings

from perf.checkpoint import DTYPES
from perf.gpu.decoding import proved
from perf.gpu.models import FP32, Precision
from perf.quality import divergence
from perf.quality.divergence import Forward
from perf.roofline.rates import Weights

TIES_A_THOUSAND = 1

BOUNDS: Mapping[Weights, Mapping[str, float]] = {
    "fp32": {"error": 1e-4, "divergence": 1e-8},
    "fp16": {"error": 1e-2, "divergence": 1e-4},
    "int8": {"error": 5e-2, "divergence": 1e-2},
}
"""Of means over all tokens. error: of the logits, relative to their spread; divergence: in nats.

INT8 rounds activations to 8 bits: a difference in the last bit before may become a whole step after. Its bounds are
those of the tests on a CPU (test_gpu_int8_linear).
"""

_ENGINES: Sequence[tuple[int, Mapping[str, str]]] = ((8, {}), (3, {}), (8, {"prefill_tokens": "256"}))
"""Slots and settings as in the tests: with few slots rows wait, with small prefills they are added in groups."""


def embedded(precision: Precision, device: torch.device, fused: bool = False) -> Checkpoint:
    """Load the embedded checkpoint in a precision.

    fused: with the engine's own kernels; RuntimeError if one of them isn't used.
    """
    if fused and device.type != "cuda":
        raise RuntimeError("the fused kernels are a GPU's")
    plain = precision.weights != "int8"
    settings = Settings(quantization="int8", int8_threshold=precision.threshold)
    if plain:
        settings = Settings(quantization="none", dtype=DTYPES[precision.weights])
    loaded = load_checkpoint(replace(settings, kernels="fused") if fused else settings, device)
    if fused and (loaded.kernels.attention is None or (loaded.kernels.few_rows is None and not plain)):
        raise RuntimeError(f"the checkpoint has {loaded.kernels.describe()} only; the log has the reason")
    return loaded


def exactness(
    device: torch.device, batches: int, seconds: float, graphs: bool = False, fused: bool = False
) -> dict[str, object]:
    """Compare FP32's tokens with generate()'s on each prompt alone, in `batches` batches or for `seconds`.

    graphs: with the steps as CUDA graphs; RuntimeError if they can't be captured. fused: see `embedded`.
    """
    checkpoint = embedded(FP32, device, fused)
    if graphs and (reason := unsupported_reason(checkpoint)):
        raise RuntimeError(reason)
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
    device: torch.device, exact: Sequence[torch.Tensor], steps: int, precision: Precision, fused: bool = False
) -> dict[str, object]:
    """Compare a precision's logits with those of the same weights alone, and with `exact`: FP32's, alone.

    fused: with the engine's own kernels.
    """
    checkpoint = embedded(precision, device, fused)
    given = texts(checkpoint, len(exact), steps)
    decoded = through_slots(checkpoint, given, steps)
    # The fused product rounds no activations, so its bounds are those of 16 bits.
    same = distance(alone(Forward(checkpoint), given, steps), decoded, "fp16" if fused else precision.weights)
    reference = distance(exact, decoded, precision.weights)
    passed = bool(same["passed"] and reference["passed"])
    return {
        **precision.to_json(),
        "loaded": checkpoint.info.describe(),
        "kernels": checkpoint.kernels.describe(),
        "rows": len(exact),
        "steps": steps,
        "against_same_weights_alone": same,
        "against_fp32_alone": reference,
        "passed": passed,
        "in_short": f"KL {same['divergence']:.2g} nats from the same weights alone, "
        f"{reference['divergence']:.2g} from FP32: {_verdict(passed)}",
    }


def exact_logits(device: torch.device, rows: int, steps: int) -> list[torch.Tensor]:
    """Return transformers' FP32 logits of `tolerance`'s texts, each alone."""
    checkpoint = embedded(FP32, device)
    model = oracle(checkpoint)
    found = []
    with torch.inference_mode():
        for text in texts(checkpoint, rows, steps):
            logits = model(input_ids=torch.tensor([text], device=device), use_cache=False).logits
            # Moved off the device: kept there, it would count against a memory plan that is checked later.
            found.append(logits[0, -steps - 1 :].cpu())
    return found


def texts(checkpoint: Checkpoint, rows: int, steps: int) -> list[tuple[int, ...]]:
    """Return `rows` texts of different lengths, each long enough for a prompt and `steps` further tokens."""
    randomness = random.Random(5)
    return [random_prompt(checkpoint.tokenizer, range(steps + 2, steps + 120), randomness)[1] for _ in range(rows)]


@torch.inference_mode()
def through_slots(checkpoint: Checkpoint, given: Sequence[Sequence[int]], steps: int) -> list[torch.Tensor]:
    """Return each text's logits [steps + 1, vocabulary] after its last `steps` + 1 tokens, all rows in one batch."""
    lengths = [len(text) - steps for text in given]
    device = checkpoint.info.device
    model = checkpoint.runner(checkpoint.cache_shape(len(given)))
    prompts = [Chunk(slot, 0, text[:length]) for slot, (text, length) in enumerate(zip(given, lengths, strict=True))]
    found = [model.logits(model.prefill(prompts))]
    slots, ends = torch.arange(len(given), device=device), torch.tensor(lengths, device=device)
    for step in range(steps):
        tokens = [text[length + step] for text, length in zip(given, lengths, strict=True)]
        rows = slots, torch.tensor(tokens, device=device), ends + step
        found.append(model.logits(model.decode(*rows, max(lengths) + step + 1)))
    return list(torch.stack(found, dim=1).cpu())


@torch.inference_mode()
def alone(forward: Forward, given: Sequence[Sequence[int]], steps: int) -> list[torch.Tensor]:
    """Return the same of each text alone, in one pass without a cache."""
    return [forward.logits(forward.hidden(text)[-steps - 1 :]).cpu() for text in given]


def distance(expected: Sequence[torch.Tensor], got: Sequence[torch.Tensor], weights: Weights) -> dict[str, Any]:
    """Compare logits text by text, including those after the last token.

    Returns mean and worst relative error of the logits, mean and worst KL divergence in nats, the bounds for these
    weights, and whether the means are within them, which NaN is not.
    """
    pairs = list(zip(expected, got, strict=True))
    error = torch.cat([(other.float() - one.float()).std(-1) / one.float().std(-1) for one, other in pairs])
    # The divergence doesn't depend on the next token.
    nats = divergence.joined([divergence.compare(one, other, one.argmax(-1)) for one, other in pairs]).divergence
    found = {
        "error": error.mean(),
        "worst_error": error.max(),
        "divergence": nats.mean(),
        "worst_divergence": nats.max(),
    }
    bounds = BOUNDS[weights]
    passed = all(float(found[name]) <= bound for name, bound in bounds.items())
    return {**{name: float(f"{value:.4g}") for name, value in found.items()}, "bounds": bounds, "passed": passed}


def _verdict(passed: bool) -> str:
    return "passed" if passed else "NOT PASSED"
