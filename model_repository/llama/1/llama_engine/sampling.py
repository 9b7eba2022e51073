"""From logits to tokens, for all rows at once and for each row by its own parameters.

Order and formulas are those of transformers' logits processors (repetition penalty, then temperature, top-k, top-p),
with the frequency and presence penalties of the OpenAI API in between and what may not be produced masked before the
temperature. Everything here is a pure function of tensors; which row carries what is `sampler.py`'s.

A draw is the Gumbel-max trick with noise that is a hash of (seed, step, token). Where inverting a cumulative sum lets a
rounding difference in one logit shift the border of every token behind it, here the winner changes only if the two
best candidates were that close to begin with. So a row draws the same tokens although its logits, computed among other
neighbours, differ in the last bit.
"""

from __future__ import annotations

import torch

_FINITE = torch.finfo(torch.float32).max
_WORD = 0xFFFFFFFF


def penalize_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Divide positive and multiply negative logits of tokens seen in prompt or completion.

    logits: [rows, vocabulary]. seen: the same, bool. penalty: [rows], > 0, 1 = off. Source: CTRL, arXiv:1909.05858.
    """
    factor = penalty[:, None]
    penalized = torch.where(logits > 0, logits / factor, logits * factor)
    # A penalty near the ends of float32 may overflow; infinities would turn into NaN further down.
    return torch.where(seen, penalized.clamp(-_FINITE, _FINITE), logits)


def penalize_output(
    logits: torch.Tensor, counts: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor
) -> torch.Tensor:
    """Subtract `frequency` per occurrence in the completion, and `presence` once.

    logits: [rows, vocabulary]. counts: the same, occurrences. frequency, presence: [rows], 0 = off.
    """
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def apply_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Divide by the row's temperature ([rows], > 0); the best logit becomes 0, so that a tiny one overflows nothing."""
    return (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]


def keep_top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask all but the `top_k` best, then all but the smallest set of probability `top_p` (one token at least).

    logits: [rows, vocabulary], after temperature. top_k: [rows], long, 1 … vocabulary. top_p: [rows], (0, 1].
    """
    # Stable, so that which of two equal logits is kept doesn't depend on the shape of the batch.
    ascending, order = logits.sort(dim=-1, stable=True)
    kth_best = ascending.gather(-1, logits.shape[-1] - top_k[:, None])
    ascending = ascending.masked_fill(ascending < kth_best, -torch.inf)
    outside = ascending.softmax(-1).cumsum(-1) <= 1.0 - top_p[:, None]
    outside &= (top_p < 1.0)[:, None]
    outside[:, -1] = False
    outside |= ascending == -torch.inf
    return logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)


def draw(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw one token a row from softmax(logits).

    logits: [rows, vocabulary]. keys: [rows, 2], long, two 32-bit words that are random in (seed, step). Returns [rows].
    """
    uniform = (_hash_tokens(keys, logits.shape[-1]).to(torch.float32) + 0.5) / 2.0**32
    # Exponential race: argmax of p / e with e ~ Exp(1). log1p keeps small e, which decide rare tokens, precise.
    exponential = -torch.log1p(-uniform.clamp(max=1.0 - 2.0**-24))
    return (logits - exponential.log()).argmax(-1)


def _hash_tokens(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return a 32-bit hash of (key, token) for every row and token: [rows, vocabulary], long.

    Two rounds of MurmurHash3's finalizer, each keyed with one word.
    """
    word = torch.arange(vocabulary, device=keys.device)[None, :] * 0x9E3779B1 & _WORD
    for key in keys.unbind(1):
        word = word ^ key[:, None]
        word = (word ^ (word >> 16)) * 0x85EBCA6B & _WORD
        word = (word ^ (word >> 13)) * 0xC2B2AE35 & _WORD
        word = word ^ (word >> 16)
    return word
