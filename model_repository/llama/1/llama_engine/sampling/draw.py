"""The draw of a batch's next tokens, each sequence with its own seed; on a CPU the filters before it run here, too.

A draw depends on the logits and on (seed, position, token) alone: its random words are Philox4x32-10's, a stateless
function of key and counter (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

`draw` is the Gumbel-max trick with noise hashed from (seed, position, token). Inverting a cumulative sum would let a
rounding error in one logit shift the boundaries of all following tokens; here the result changes only if the two best
candidates nearly tie. So a sequence draws the same tokens in another batch, although its logits' last bits may differ.

`draw_on_cpu` computes the same only for the few tokens of a sequence that can win. The draw is an exponential race: a
token of probability p finishes at time e / p, with e ~ Exp(1), and the first token wins; with top-p, the first token of
the nucleus. Two shortcuts make it fast:

- e is never less than the hash as a fraction in [0, 1). Comparing this fraction with a bound finds the about 32 tokens
  that finish first, without a logarithm per token.
- A token is in the nucleus if the probabilities above its own sum to less than top-p, which needs no sort.

In the rare cases where a rounding error could change the result, a sequence's logits are sorted and drawn as on a GPU.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from llama_engine.sampling.filters import filtered

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(key: NDArray[np.uint64], counter: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return four random 32-bit words for each (key, counter).

    key: [n] 64-bit. counter: [n, 4], 32-bit words. Returns [n, 4], 32-bit words in uint64.
    """
    k0, k1 = key & _LOW, key >> _32
    c0, c1, c2, c3 = counter.T
    for _ in range(10):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1)


def position_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return two random 32-bit words for each sequence's (seed, position): [batch, 2]."""
    counter = np.zeros((len(seeds), 4), dtype=np.uint64)
    counter[:, 0] = positions
    return philox4x32(seeds, counter)[:, :2].astype(np.int64)


def choice_seed(seed: int, choice: int) -> int:
    """Return the 64-bit seed of a request's choice; choice 0 has the request's seed.

    The choice is the second word of the Philox counter. Draws have 0 there, so choices don't share random words.
    """
    if choice == 0:
        return seed
    counter = np.array([[0, choice, 0, 0]], dtype=np.uint64)
    low, high, *_ = philox4x32(np.array([seed], dtype=np.uint64), counter)[0].tolist()
    return int(low | high << 32)


_WORD = 0xFFFFFFFF

HASH_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
"""Multipliers of the hash: one for the token's id, two of MurmurHash3's finalizer."""


def draw(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw one token per sequence from softmax(logits).

    logits: [batch, vocabulary]. keys: [batch, 2], long, two random 32-bit words for (seed, position). Returns [batch].
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
    """Return a 32-bit hash of (key, token) for each sequence's tokens: [batch, n], long. tokens: [1, n].

    Two rounds of MurmurHash3's finalizer, each keyed with one word.
    """
    word = tokens * HASH_FACTORS[0] & _WORD
    for key in keys.unbind(1):
        word = word ^ key[:, None]
        word = (word ^ (word >> 16)) * HASH_FACTORS[1] & _WORD
        word = (word ^ (word >> 13)) * HASH_FACTORS[2] & _WORD
        word = word ^ (word >> 16)
    return word


EXPECTED_FINISHERS = 32
"""Expected number of nucleus tokens that finish before the bound. With probability e^-16 none finishes before half of
the bound, and the token is drawn as on a GPU."""

MIN_TOP_P = 0.02
"""Lower limit of top_p in computing the bound; with a smaller one, most of the vocabulary would finish before it."""

MARGIN = 2e-5
"""Tolerance for a cumulative probability: 10 × the float32 rounding error."""

BLOCK = 1 << 17
"""Maximum logits computed together, in whole sequences, so that intermediate arrays fit a core's cache."""

_UNDECIDED = -1

_Floats = NDArray[np.float32]


def draw_on_cpu(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    keys: torch.Tensor,
    log_min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the tokens, [batch], of `draw(filtered(logits, temperature, top_k, top_p, log_min_p), keys)`.

    logits: [batch, vocabulary], float32 on a CPU, each sequence's maximum finite. keys: [batch, 2], random words.
    """
    threshold = _kth_largest(logits, top_k)
    # From here on NumPy computes in this thread: on a busy machine, waiting for PyTorch's threads costs more than they
    # save.
    nucleus, race_keys, whole = top_p.numpy(), keys.numpy().astype(np.uint32), logits.numpy()
    divisor = temperature.numpy()[:, None]
    lowest = None if log_min_p is None else log_min_p.numpy()[:, None]
    rows_at_once = max(BLOCK // logits.shape[1], 1)
    tokens: list[int] = []
    for first in range(0, len(logits), rows_at_once):
        part = slice(first, first + rows_at_once)
        lowest_part = None if lowest is None else lowest[part]
        tempered = _tempered(whole[part], divisor[part], threshold[part], lowest_part)
        tokens += _race(tempered, nucleus[part], race_keys[part])
    drawn = torch.tensor(tokens)
    rest = (drawn == _UNDECIDED).nonzero()[:, 0]
    if len(rest):
        log_min_p = None if log_min_p is None else log_min_p[rest]
        drawn[rest] = draw(filtered(logits[rest], temperature[rest], top_k[rest], top_p[rest], log_min_p), keys[rest])
    return drawn


def _kth_largest(logits: torch.Tensor, top_k: torch.Tensor) -> _Floats:
    """Return the top_k-th largest logit of each sequence, [batch, 1]; -inf if top_k is the size of the vocabulary."""
    limited = top_k < logits.shape[1]
    largest = int(torch.where(limited, top_k, 0).amax())
    if not largest:
        return np.full((len(logits), 1), -np.inf, dtype=np.float32)
    kth_best = logits.topk(largest).values.gather(1, (top_k[:, None] - 1).clamp(max=largest - 1))
    return torch.where(limited[:, None], kth_best, -torch.inf).numpy()


def _tempered(logits: _Floats, temperature: _Floats, threshold: _Floats, lowest: _Floats | None) -> _Floats:
    """Apply the temperature with the same bits as `filtered`, and mask logits.

    threshold: lowest logit of the top_k, [batch, 1]. lowest: lowest logit after the temperature that min_p keeps,
    [batch, 1].
    """
    best = logits.max(-1, keepdims=True)
    # A tiny temperature overflows to -inf.
    with np.errstate(over="ignore"):
        tempered: _Floats = (logits - best) / temperature
        if np.isfinite(threshold).any():
            tempered[tempered < (threshold - best) / temperature] = -np.inf
    if lowest is not None:
        tempered[tempered < lowest] = -np.inf
    return tempered


def _race(logits: _Floats, top_p: _Floats, keys: NDArray[np.uint32]) -> list[int]:
    """Return each sequence's token, or _UNDECIDED. logits: [batch, vocabulary], the best is 0. keys: [batch, 2]."""
    batch, vocabulary = logits.shape
    weights = np.exp(logits)
    total = weights.sum(-1)
    # `bound` is the upper limit of e / weight. The weights of all tokens sum to `total`, those of the nucleus to top_p
    # * total.
    bound = EXPECTED_FINISHERS / (np.maximum(top_p, MIN_TOP_P) * total)
    words = _hash_on_cpu(keys, vocabulary)
    close = words.astype(np.float32) <= weights * (bound * 2.0**32)[:, None]
    # Two-dimensional np.nonzero takes ten times as long.
    index, token = np.divmod(np.flatnonzero(close), vocabulary)
    finished = torch.from_numpy(logits[index, token]), torch.from_numpy(words[index, token].astype(np.int64))
    scores = noisy(*finished).numpy()
    # A score is -log(e / weight). Use finishers up to half of the bound: near the bound, rounding may exclude some.
    min_scores = -np.log(bound / 2)
    ends = np.searchsorted(index, np.arange(batch + 1)).tolist()
    drawn = []
    for at, (first, last) in enumerate(pairwise(ends)):
        places = first + np.argsort(-scores[first:last], kind="stable")
        finishers = token[places[scores[places] >= min_scores[at]]]
        drawn.append(_first_of_nucleus(finishers, logits[at], weights[at], float(total[at]), float(top_p[at])))
    return drawn


def _first_of_nucleus(
    finishers: NDArray[np.int64], logits: _Floats, weights: _Floats, total: float, top_p: float
) -> int:
    """Return the first finisher in the nucleus; _UNDECIDED if there is none or if rounding may change the result."""
    outside = -np.inf
    token: int
    for token in finishers.tolist():
        logit = float(logits[token])
        if logit <= outside:
            continue
        if top_p >= 1.0:
            return token
        better = float((weights * (logits > logit)).sum()) / total
        # The most likely token (no token is better) is in every nucleus.
        if not better or better < top_p - MARGIN:
            return token
        if better < top_p + MARGIN:
            break
        outside = logit
    return _UNDECIDED


def _hash_on_cpu(keys: NDArray[np.uint32], vocabulary: int) -> NDArray[np.uint32]:
    """Return the 32-bit hashes that `draw` uses, for every token: [batch, vocabulary]."""
    by_token, *factors = map(np.uint32, HASH_FACTORS)
    words = (np.arange(vocabulary, dtype=np.uint32) * by_token)[None] ^ np.zeros_like(keys[:, :1])
    shifted = np.empty_like(words)
    for key in keys.T:
        words ^= key[:, None]
        for bits, factor in zip((16, 13), factors, strict=True):
            words ^= np.right_shift(words, np.uint32(bits), out=shifted)
            words *= factor
        words ^= np.right_shift(words, np.uint32(16), out=shifted)
    return words
