"""Filters of a batch's next tokens: temperature, min-p, top-k, top-p, each sequence with its own.

`Sampler` (sampler.py) and, on a CPU, draw.py apply them in that order. Order and formulas are those of transformers'
logits processors and, for min-p, of vLLM.
"""

from __future__ import annotations

import torch


def apply_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Subtract each maximum, so that a tiny temperature can't overflow, and divide by temperature [batch], > 0."""
    return (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]


def keep_min_p(logits: torch.Tensor, log_min_p: torch.Tensor) -> torch.Tensor:
    """Mask tokens that are less than min_p times as likely as the best one.

    logits: [batch, vocabulary], from `apply_temperature`, so that the best one is 0. log_min_p: [batch], the logarithm
    of min_p; -inf is off. Source: min-p sampling, arXiv:2407.01082.
    """
    return logits.masked_fill(logits < log_min_p[:, None], -torch.inf)


def keep_top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask all but the `top_k` best tokens, then all but the smallest set of probability `top_p` (at least one token).

    logits: [batch, vocabulary], after temperature. top_k: [batch], long, 1 … vocabulary. top_p: [batch], (0, 1]. Tokens
    that tie with the last one in the set are kept, so the result does not depend on the sort order of equal logits.
    """
    ranked = logits.sort(dim=-1, descending=True).values
    among = ranked.masked_fill(ranked < ranked.gather(-1, top_k[:, None] - 1), -torch.inf)
    probability = (among - among.logsumexp(-1, keepdim=True)).exp()
    nucleus = (probability.cumsum(-1) - probability < top_p[:, None]) | (top_p >= 1.0)[:, None]
    nucleus &= among > -torch.inf
    nucleus[:, 0] = True
    worst = torch.where(nucleus, ranked, torch.inf).amin(-1, keepdim=True)
    return logits.masked_fill(logits < worst, -torch.inf)
