"""Logits processors and sampling for all rows at once, each row with its own parameters: pure functions of tensors.

On a CPU, `cpu_sampling` has a faster implementation of temperature, min-p, top-k, top-p and the draw. Change both files
together.

The order is: bias (`sampler`), repetition penalty, frequency and presence penalties, mask (`sampler`), temperature,
min-p, top-k, top-p, draw. Order and formulas are those of transformers' logits processors and, for the OpenAI API's
penalties and min-p, of vLLM. Which tokens are penalized, of prompt or completion, `sampler` decides.

`draw` is the Gumbel-max trick with noise hashed from (seed, step, token). Inverting a cumulative sum would let a
rounding error in one logit shift the boundaries of all following tokens; here the result changes only if the two best
candidates nearly tie. So a row draws the same tokens in another batch, although its logits may differ in the last bit.
"""

from __future__ import annotations

import numpy as np
import torch

_FINITE = torch.finfo(torch.float32).max
_WORD = 0xFFFFFFFF

HASH_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
"""Multipliers of the hash: one for the token's id, two of MurmurHash3's finalizer."""


def penalize_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Divide positive and multiply negative logits of tokens seen in prompt or completion.

    logits: [rows, vocabulary]. seen: the same, bool. penalty: [rows], > 0, 1 = off. Source: CTRL, arXiv:1909.05858.
    """
    factor = penalty[:, None]
    penalized = torch.where(logits > 0, logits / factor, logits * factor)
    # A penalty near float32's limits can overflow to infinity, which later processors would turn into NaN.
    return torch.where(seen, penalized.clamp(-_FINITE, _FINITE), logits)


def penalize_output(
    logits: torch.Tensor, counts: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor
) -> torch.Tensor:
    """Subtract `frequency` per occurrence in the completion, and `presence` once.

    logits: [rows, vocabulary]. counts: the same, occurrences. frequency, presence: [rows], 0 = off.
    """
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def apply_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Subtract the row's maximum, so that a tiny temperature can't overflow, and divide by temperature [rows], > 0."""
    return (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]


def keep_min_p(logits: torch.Tensor, log_min_p: torch.Tensor) -> torch.Tensor:
    """Mask tokens that are less than min_p times as likely as the best one.

    logits: [rows, vocabulary], from `apply_temperature`, so that the best one is 0. log_min_p: [rows], the logarithm
    of min_p; -inf is off. Source: min-p sampling, arXiv:2407.01082.
    """
    return logits.masked_fill(logits < log_min_p[:, None], -torch.inf)


def keep_top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask all but the `top_k` best tokens, then all but the smallest set of probability `top_p` (at least one token).

    logits: [rows, vocabulary], after temperature. top_k: [rows], long, 1 … vocabulary. top_p: [rows], (0, 1]. Tokens
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


def draw(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw one token per row from softmax(logits).

    logits: [rows, vocabulary]. keys: [rows, 2], long, two random 32-bit words for (seed, step). Returns [rows].
    """
    tokens = torch.arange(logits.shape[-1], device=logits.device)[None]
    return noisy(logits, _hash(keys, tokens)).argmax(-1)


def noisy(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return logits plus Gumbel noise; the argmax is the drawn token. words: random 32-bit words, long, same shape."""
    uniform = (words.to(torch.float32) + 0.5) / 2.0**32
    # Exponential race: argmax of p / e with e ~ Exp(1). log1p is precise for small e, by which rare tokens win.
    exponential = -torch.log1p(-uniform.clamp(max=1.0 - 2.0**-24))
    return logits - exponential.log()


def _hash(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return a 32-bit hash of (key, token) for each row's tokens: [rows, n], long. tokens: [1, n].

    Two rounds of MurmurHash3's finalizer, each keyed with one word.
    """
    word = tokens * HASH_FACTORS[0] & _WORD
    for key in keys.unbind(1):
        word = word ^ key[:, None]
        word = (word ^ (word >> 16)) * HASH_FACTORS[1] & _WORD
        word = (word ^ (word >> 13)) * HASH_FACTORS[2] & _WORD
        word = word ^ (word >> 16)
    return word


def forbidden(allowed: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Unpack the bit masks of guides: return which tokens are not allowed, [rows, vocabulary], bool.

    allowed: [rows, ceil(vocabulary / 32)], int32, in the format of `GuideState.fill`; on any device.
    """
    if allowed.device.type == "cpu":
        bits = np.unpackbits(allowed.numpy().view(np.uint8), axis=-1, count=vocabulary, bitorder="little")
        return torch.from_numpy(bits == 0)
    places = torch.arange(32, dtype=torch.int32, device=allowed.device)
    return ((allowed[:, :, None] >> places) & 1).flatten(1)[:, :vocabulary] == 0
