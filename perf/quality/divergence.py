"""How far one model's next-token distributions are from another's, token by token. Knows tensors, and no models.

For one predicted token with the reference's distribution P and the candidate's Q over the vocabulary:

    KL(P || Q) = sum of P (log P - log Q)      nats; what is lost by believing Q where P is right; 0 if they are equal
    agreement  = P and Q have their maximum at the same token: greedy decoding would go on alike
    loss       = -log of the probability of the token that the text has; its mean's exponential is the perplexity
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """Figures of predicted tokens, each a float64 or bool tensor [tokens] on the CPU; losses and divergence in nats."""

    reference_loss: Tensor
    loss: Tensor
    divergence: Tensor
    agrees: Tensor

    @classmethod
    def joined(cls, parts: list[Tokens]) -> Tokens:
        """Return the parts' tokens in one."""
        return cls(
            torch.cat([part.reference_loss for part in parts]),
            torch.cat([part.loss for part in parts]),
            torch.cat([part.divergence for part in parts]),
            torch.cat([part.agrees for part in parts]),
        )


def compare(reference: Tensor, candidate: Tensor, targets: Tensor) -> Tokens:
    """Compare logits [tokens, vocabulary] of both models, of any float type, where the text goes on with `targets`.

    In float64: the difference of two nearly equal logarithms is what is asked for.
    """
    expected, got = reference.double().log_softmax(-1), candidate.double().log_softmax(-1)
    # A token of probability 0 adds nothing; 0 * (-inf - -inf) would be not-a-number.
    terms = torch.where(expected.isneginf(), 0.0, expected.exp() * (expected - got))
    chosen = targets.unsqueeze(-1)
    return Tokens(
        reference_loss=-expected.gather(-1, chosen).squeeze(-1).cpu(),
        loss=-got.gather(-1, chosen).squeeze(-1).cpu(),
        divergence=terms.sum(-1).cpu(),
        agrees=(expected.argmax(-1) == got.argmax(-1)).cpu(),
    )


def perplexity(losses: Tensor) -> float:
    """Return exp of the mean loss, as the model card's figure is defined."""
    return math.exp(float(losses.mean()))


def summary(tokens: Tokens) -> dict[str, object]:
    """Return the candidate's perplexity and its distance from the reference, in nats per token; for a result's file.

    loss_difference: the candidate's loss over the reference's, token by token; two standard errors around 0 is noise.
    """
    difference = tokens.loss - tokens.reference_loss
    return {
        "perplexity": round(perplexity(tokens.loss), 4),
        "kl_nats": {
            "mean": _digits(tokens.divergence.mean()),
            "p99": _digits(_nearest_rank(tokens.divergence, 0.99)),
            "max": _digits(tokens.divergence.max()),
        },
        "top1_agreement": round(float(tokens.agrees.double().mean()), 6),
        "loss_difference": {
            "mean": _digits(difference.mean()),
            "standard_error": _digits(difference.std() / math.sqrt(len(difference))),
        },
    }


def _nearest_rank(values: Tensor, share: float) -> Tensor:
    return values.sort().values[max(0, math.ceil(share * len(values)) - 1)]


def _digits(value: Tensor) -> float:
    return float(f"{float(value):.5g}")
