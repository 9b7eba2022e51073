"""Distance between two models' next-token distributions over the same text.

For one predicted token with the reference's distribution P and the candidate's Q over the vocabulary:

    KL(P || Q) = sum of P (log P - log Q)      nats; what is lost by using Q where P is right; 0 if they are equal
    agreement  = P and Q have their maximum at the same token: greedy decoding continues alike
    loss       = -log of the probability of the text's token; its mean's exponential is the perplexity
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM

POSITIONS_AT_ONCE = 256
"""Positions per pass of the head: a whole row's logits (4,096 x 32,000) would exceed the activations of the rest."""


class Tokens(NamedTuple):
    """Figures per predicted token, each a float64 or bool tensor [tokens] on the CPU; losses and divergence in nats."""

    reference_loss: Tensor
    loss: Tensor
    divergence: Tensor
    agrees: Tensor


def joined(parts: Sequence[Tokens]) -> Tokens:
    """Concatenate the parts."""
    return Tokens(*map(torch.cat, zip(*parts, strict=True)))


@torch.inference_mode()
def both(
    reference: LlamaForCausalLM, candidate: LlamaForCausalLM, rows: Sequence[Sequence[int]], progress: tqdm[NoReturn]
) -> Tokens:
    """Predict every token but each row's first with both models; `progress` counts the tokens.

    Each row is a pass of its own: no padding, and under an outlier threshold, where bitsandbytes takes the outlier
    columns over everything in a pass, these are one text's own tokens.
    """
    parts = []
    for row in rows:
        ids = torch.tensor([row], device=reference.device)
        # Each [tokens, hidden].
        expected, got = (model.model(input_ids=ids, use_cache=False)[0][0] for model in (reference, candidate))
        for first in range(0, len(row) - 1, POSITIONS_AT_ONCE):
            last = min(first + POSITIONS_AT_ONCE, len(row) - 1)
            targets = ids[0, first + 1 : last + 1]
            parts.append(compare(reference.lm_head(expected[first:last]), candidate.lm_head(got[first:last]), targets))
        progress.update(len(row) - 1)
    return joined(parts)


def compare(reference: Tensor, candidate: Tensor, targets: Tensor) -> Tokens:
    """Compare both models' logits [tokens, vocabulary], of any float type; targets: the text's next tokens.

    In float64, because the result is the difference of nearly equal logarithms.
    """
    expected, got = reference.double().log_softmax(-1), candidate.double().log_softmax(-1)
    # A token of probability 0 adds nothing; 0 * (-inf - -inf) would be NaN.
    terms = torch.where(expected.isneginf(), 0.0, expected.exp() * (expected - got))
    chosen = targets.unsqueeze(-1)
    return Tokens(
        reference_loss=-expected.gather(-1, chosen).squeeze(-1).cpu(),
        loss=-got.gather(-1, chosen).squeeze(-1).cpu(),
        divergence=terms.sum(-1).cpu(),
        agrees=(expected.argmax(-1) == got.argmax(-1)).cpu(),
    )


def perplexity(losses: Tensor) -> float:
    """Return exp of the mean loss, the model card's definition."""
    return math.exp(float(losses.mean()))


def summary(tokens: Tokens) -> dict[str, object]:
    """Return the candidate's perplexity and its distance from the reference in nats per token, for a result file.

    loss_difference: the candidate's loss minus the reference's; within two standard errors of 0 it is noise.
    """
    difference, count = tokens.loss - tokens.reference_loss, len(tokens.loss)
    # By nearest rank, which counts from 1.
    p99 = tokens.divergence.kthvalue(math.ceil(0.99 * count)).values
    kl_nats = {"mean": tokens.divergence.mean(), "p99": p99, "max": tokens.divergence.max()}
    loss_difference = {"mean": difference.mean(), "standard_error": difference.std() / math.sqrt(count)}
    return {
        "perplexity": round(perplexity(tokens.loss), 4),
        "kl_nats": {name: float(f"{value:.5g}") for name, value in kl_nats.items()},
        "top1_agreement": round(float(tokens.agrees.double().mean()), 6),
        "loss_difference": {name: float(f"{value:.5g}") for name, value in loss_difference.items()},
    }
