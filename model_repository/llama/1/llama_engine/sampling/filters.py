"""Filters of a batch's next tokens: temperature, min-p, top-k, top-p, each sequence with its own.

`Sampler` (sampler.py) and, on a CPU, draw.py apply them. Order and formulas are those of transformers' logits
processors and, for min-p, of vLLM.
"""

from __future__ import annotations

import torch


def filtered(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor | None = None,
    truncation: bool = True,
) -> torch.Tensor:
    """Return the logits [batch, vocabulary] after temperature, min-p, top-k and top-p; masked ones are -inf.

    temperature: [batch], > 0. top_k: [batch], long, 1 … vocabulary. top_p: [batch], (0, 1]. log_min_p: [batch], the
    logarithm of min_p, -inf is off; None is off for every sequence. truncation: whether any has top_k or top_p.
    """
    # Each maximum is subtracted, so that a tiny temperature can't overflow.
    result = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    if log_min_p is not None:
        # Mask tokens that are less than min_p times as likely as the best one, which is 0 (arXiv:2407.01082).
        result = result.masked_fill(result < log_min_p[:, None], -torch.inf)
    return _keep_top_k_top_p(result, top_k, top_p) if truncation else result


def _keep_top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask all but the `top_k` best tokens, then all but the smallest set of probability `top_p` (at least one token).

    Tokens that tie with the last one in the set are kept, so that the sort order of equal logits changes nothing.
    """
    ranked = logits.sort(dim=-1, descending=True).values
    among = ranked.masked_fill(ranked < ranked.gather(-1, top_k[:, None] - 1), -torch.inf)
    probability = (among - among.logsumexp(-1, keepdim=True)).exp()
    nucleus = (probability.cumsum(-1) - probability < top_p[:, None]) | (top_p >= 1.0)[:, None]
    nucleus &= among > -torch.inf
    nucleus[:, 0] = True
    worst = torch.where(nucleus, ranked, torch.inf).amin(-1, keepdim=True)
    return logits.masked_fill(logits < worst, -torch.inf)
