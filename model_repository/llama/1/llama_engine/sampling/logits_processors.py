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

CANDIDATES = 256
"""On a CPU, so many of a row's best tokens are looked at before the whole vocabulary is."""


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

    logits: [rows, vocabulary], after temperature. top_k: [rows], long, 1 … vocabulary. top_p: [rows], (0, 1]. Tokens
    as good as the worst one kept are kept too, so that nothing depends on the order in which equals are sorted.
    """
    total, vocabulary = logits.logsumexp(-1), logits.shape[-1]
    if logits.device.type != "cpu" or vocabulary <= CANDIDATES:
        worst, _ = _worst_kept(logits.sort(dim=-1, descending=True).values, total, top_k, top_p, vocabulary)
    else:
        # Sorting whole vocabularies is most of the work of a step on a CPU, and nearly always the best few decide. On a
        # GPU it is quick, and finding out whether they do would be a wait for the device.
        worst, found = _worst_kept(logits.topk(CANDIDATES).values, total, top_k, top_p, vocabulary)
        rest = (~found).nonzero()[:, 0]
        if len(rest):
            ranked = logits[rest].sort(dim=-1, descending=True).values
            worst[rest], _ = _worst_kept(ranked, total[rest], top_k[rest], top_p[rest], vocabulary)
    return logits.masked_fill(logits < worst[:, None], -torch.inf)


def _worst_kept(
    best: torch.Tensor, total: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's lowest logit that is kept, and whether the best ones were enough to tell: both [rows].

    best: [rows, n], the n best logits in descending order. total: [rows], logsumexp of all.
    """
    count = best.shape[-1]
    kth_best = best.gather(-1, (top_k[:, None] - 1).clamp(max=count - 1))
    # Beyond the last one may be others as good as it.
    k_inside = kth_best[:, 0] > best[:, -1]
    among = torch.where(k_inside[:, None] & (best < kth_best), -torch.inf, best)
    total = torch.where(k_inside, among.logsumexp(-1), total)
    probability = (among - total[:, None]).exp()
    kept = (probability.cumsum(-1) - probability < top_p[:, None]) | (top_p >= 1.0)[:, None]
    kept &= among > -torch.inf
    kept[:, 0] = True
    worst = torch.where(kept, best, torch.inf).amin(-1)
    everything = (top_p >= 1.0) & ~k_inside
    p_inside = (top_k >= vocabulary) & (everything | ~kept[:, -1])
    return torch.where(everything, -torch.inf, worst), k_inside | p_inside


def draw(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw one token a row from softmax(logits).

    logits: [rows, vocabulary]. keys: [rows, 2], long, two 32-bit words that are random in (seed, step). Returns [rows].
    """
    tokens = torch.arange(logits.shape[-1], device=logits.device)[None]
    if logits.device.type == "cpu" and logits.shape[-1] > CANDIDATES:
        # What is masked can't win. On a CPU it is worth leaving out; on a GPU, counting it would be a wait.
        possible = int((logits > -torch.inf).sum(-1).max())
        if possible <= CANDIDATES:
            logits, tokens = logits.topk(max(possible, 1))
    uniform = (_hash(keys, tokens).to(torch.float32) + 0.5) / 2.0**32
    # Exponential race: argmax of p / e with e ~ Exp(1). log1p keeps small e, which decide rare tokens, precise.
    exponential = -torch.log1p(-uniform.clamp(max=1.0 - 2.0**-24))
    best = (logits - exponential.log()).argmax(-1, keepdim=True)
    return tokens.expand(logits.shape).gather(-1, best)[:, 0]


def _hash(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return a 32-bit hash of (key, token) for every row's tokens: [rows, n], long. tokens: [rows, n] or [1, n].

    Two rounds of MurmurHash3's finalizer, each keyed with one word.
    """
    word = tokens * 0x9E3779B1 & _WORD
    for key in keys.unbind(1):
        word = word ^ key[:, None]
        word = (word ^ (word >> 16)) * 0x85EBCA6B & _WORD
        word = (word ^ (word >> 13)) * 0xC2B2AE35 & _WORD
        word = word ^ (word >> 16)
    return word
