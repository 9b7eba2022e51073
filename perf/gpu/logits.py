"""Distance between the logits of decoding through slots and of a plain forward pass over each text alone.

The text is given token by token, so both see the same tokens at every position. Two comparisons per precision: with the
same weights alone, for the effect of slots, padding, neighbours and shapes; and with FP32, which adds the effect of the
precision itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from engine.prompts import random_prompt
from llama_engine.model.kv_cache import KVCache, KVCacheShape
from llama_engine.model.loader import Checkpoint
from llama_engine.model.memory_plan import plan_memory
from llama_engine.model.model_runner import ModelRunner
from llama_engine.settings import Settings

from perf.quality.divergence import Tokens, compare


@dataclass(frozen=True)
class Bounds:
    """Upper bounds. error: of the logits, relative to their spread; divergence: in nats; means over all tokens."""

    error: float
    divergence: float


SAME_WEIGHTS = {"fp32": Bounds(1e-4, 1e-8), "fp16": Bounds(1e-2, 1e-4), "int8": Bounds(5e-2, 1e-2)}
"""INT8 rounds activations to 8 bits: a difference in the last bit before may become a whole step after."""
AGAINST_FP32 = {"fp32": Bounds(1e-4, 1e-8), "fp16": Bounds(1e-2, 1e-4), "int8": Bounds(5e-2, 1e-2)}
"""INT8's are those of the tests on a CPU (test_int8_linear)."""


@dataclass(frozen=True)
class Distance:
    """Over all tokens: mean and worst relative error of the logits, mean and worst KL divergence in nats."""

    error: float
    worst_error: float
    divergence: float
    worst_divergence: float

    def within(self, bounds: Bounds) -> bool:
        """Return whether the means are within their bounds; NaN is not."""
        return self.error <= bounds.error and self.divergence <= bounds.divergence

    def to_json(self, bounds: Bounds) -> dict[str, object]:
        """Return the figures to four digits, with their bounds."""
        figures = {name: float(f"{value:.4g}") for name, value in vars(self).items()}
        return {**figures, "bounds": vars(bounds), "passed": self.within(bounds)}


def texts(checkpoint: Checkpoint, rows: int, steps: int, seed: int = 5) -> list[tuple[int, ...]]:
    """Return `rows` texts of different lengths, each long enough for a prompt and `steps` further tokens."""
    randomness = random.Random(seed)
    return [random_prompt(checkpoint.tokenizer, range(steps + 2, steps + 120), randomness)[1] for _ in range(rows)]


@torch.inference_mode()
def through_slots(checkpoint: Checkpoint, given: Sequence[Sequence[int]], steps: int) -> list[torch.Tensor]:
    """Return each text's logits [steps + 1, vocabulary] after its last `steps` + 1 tokens, all rows in one batch."""
    lengths = [len(text) - steps for text in given]
    device = checkpoint.info.device
    model = ModelRunner(checkpoint, KVCache(_shape(checkpoint, len(given), max(map(len, given))), device))
    found = [model.logits(model.prefill(0, [text[:length] for text, length in zip(given, lengths, strict=True)]))]
    for step in range(steps):
        tokens = [text[length + step] for text, length in zip(given, lengths, strict=True)]
        positions = torch.tensor([[length + step] for length in lengths], device=device)
        span = model.decode_span(max(lengths) + step)
        found.append(model.logits(model.decode(0, torch.tensor(tokens, device=device)[:, None], positions, span)))
    return list(torch.stack(found, dim=1).cpu())


@torch.inference_mode()
def alone(checkpoint: Checkpoint, given: Sequence[Sequence[int]], steps: int) -> list[torch.Tensor]:
    """Return the same by transformers' forward over each text alone, without a cache."""
    device = checkpoint.info.device
    found = []
    for text in given:
        hidden = checkpoint.model.model(input_ids=torch.tensor([text], device=device), use_cache=False)
        # Moved off the device: kept there, it would count against a memory plan that is checked later.
        found.append(checkpoint.model.lm_head(hidden.last_hidden_state[0, -steps - 1 :]).cpu())
    return found


def distance(expected: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> Distance:
    """Compare logits text by text, including those after the last token."""
    errors, parts = list[torch.Tensor](), list[Tokens]()
    for one, other in zip(expected, got, strict=True):
        errors.append((other.float() - one.float()).std(-1) / one.float().std(-1))
        # The divergence doesn't depend on the next token.
        parts.append(compare(one, other, one.argmax(-1)))
    error, divergence = torch.cat(errors), Tokens.joined(parts).divergence
    return Distance(float(error.mean()), float(error.max()), float(divergence.mean()), float(divergence.max()))


def _shape(checkpoint: Checkpoint, slots: int, longest: int) -> KVCacheShape:
    planned = plan_memory(checkpoint, Settings(), slots).shape
    assert longest <= planned.max_model_len, "a text is longer than the checkpoint's context"
    return planned
