"""`logits_processors.draw` on a CPU, computed only for the few tokens of a row that can win the draw.

The draw is an exponential race: a token of probability p finishes at time e / p, with e ~ Exp(1) hashed from
(seed, step, token), and the first token wins; with top-p, the first token of the nucleus. Two shortcuts make it fast:

- e is never less than the hash as a fraction in [0, 1). Comparing this fraction with a bound finds the about 32 tokens
  that finish first, without a logarithm per token.
- A token is in the nucleus if the probabilities above its own sum to less than top-p, which needs no sort.

In the rare rows where a rounding error could change the result, the row is sorted and drawn as on a GPU.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from llama_engine.sampling.filters import (
    HASH_FACTORS,
    apply_temperature,
    draw,
    keep_min_p,
    keep_top_k_top_p,
    noisy,
)

EXPECTED_FINISHERS = 32
"""Expected number of nucleus tokens that finish before the bound. With probability e^-16 none finishes before half of
the bound, and the row is drawn as on a GPU."""

MIN_TOP_P = 0.02
"""Lower limit of top_p in computing the bound; with a smaller one, most of the vocabulary would finish before it."""

MARGIN = 2e-5
"""Tolerance for a cumulative probability: 10 × the float32 rounding error."""

BLOCK = 1 << 17
"""Maximum logits computed together, in whole rows, so that intermediate arrays fit a core's cache."""

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
    """Return the tokens, [rows], of `draw(keep_top_k_top_p(keep_min_p(apply_temperature(logits))))`.

    logits: [rows, vocabulary], float32 on a CPU, each row's maximum finite. temperature: [rows], > 0. top_k: [rows],
    1 … vocabulary. top_p: [rows], (0, 1]. keys: [rows, 2], random words. log_min_p: [rows], the logarithm of min_p;
    None is off in every row.
    """
    threshold = _kth_largest(logits, top_k)
    # NumPy from here on, in this thread: on a busy machine, waiting for PyTorch's threads costs more than they save.
    nucleus, words, whole = top_p.numpy(), keys.numpy().astype(np.uint32), logits.numpy()
    divisor = temperature.numpy()[:, None]
    lowest = None if log_min_p is None else log_min_p.numpy()[:, None]
    rows_at_once = max(BLOCK // logits.shape[1], 1)
    tokens: list[int] = []
    for first in range(0, len(logits), rows_at_once):
        part = slice(first, first + rows_at_once)
        lowest_part = None if lowest is None else lowest[part]
        tokens += _race(_tempered(whole[part], divisor[part], threshold[part], lowest_part), nucleus[part], words[part])
    drawn = torch.tensor(tokens)
    rest = (drawn == _UNDECIDED).nonzero()[:, 0]
    if len(rest):
        tempered = apply_temperature(logits[rest], temperature[rest])
        if log_min_p is not None:
            tempered = keep_min_p(tempered, log_min_p[rest])
        drawn[rest] = draw(keep_top_k_top_p(tempered, top_k[rest], top_p[rest]), keys[rest])
    return drawn


def _kth_largest(logits: torch.Tensor, top_k: torch.Tensor) -> _Floats:
    """Return the top_k-th largest logit of each row, [rows, 1]; -inf if top_k is the size of the vocabulary."""
    limited = top_k < logits.shape[1]
    largest = int(torch.where(limited, top_k, 0).amax())
    if not largest:
        return np.full((len(logits), 1), -np.inf, dtype=np.float32)
    kth_best = logits.topk(largest).values.gather(1, (top_k[:, None] - 1).clamp(max=largest - 1))
    return torch.where(limited[:, None], kth_best, -torch.inf).numpy()


def _tempered(logits: _Floats, temperature: _Floats, threshold: _Floats, lowest: _Floats | None) -> _Floats:
    """Apply the temperature with the same bits as `apply_temperature`, and mask logits.

    threshold: minimum before the temperature, [rows, 1]. lowest: minimum after it, [rows, 1].
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
    """Return each row's token, or _UNDECIDED. logits: [rows, vocabulary], the best of each row 0. keys: [rows, 2]."""
    rows, vocabulary = logits.shape
    weights = np.exp(logits)
    total = weights.sum(-1)
    # Upper limit of e / weight. The weights of all tokens sum to `total`, those of the nucleus to top_p * total.
    bound = EXPECTED_FINISHERS / (np.maximum(top_p, MIN_TOP_P) * total)
    words = _hash(keys, vocabulary)
    close = words.astype(np.float32) <= weights * (bound * 2.0**32)[:, None]
    # Two-dimensional np.nonzero takes ten times as long.
    row, token = np.divmod(np.flatnonzero(close), vocabulary)
    finished = torch.from_numpy(logits[row, token]), torch.from_numpy(words[row, token].astype(np.int64))
    scores = noisy(*finished).numpy()
    # A score is -log(e / weight). Use finishers up to half of the bound: near the bound, rounding may exclude some.
    threshold = -np.log(bound / 2)
    ends = np.searchsorted(row, np.arange(rows + 1)).tolist()
    drawn = []
    for at, (first, last) in enumerate(pairwise(ends)):
        places = first + np.argsort(-scores[first:last], kind="stable")
        finishers = token[places[scores[places] >= threshold[at]]]
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


def _hash(keys: NDArray[np.uint32], vocabulary: int) -> NDArray[np.uint32]:
    """Return the 32-bit hashes that `logits_processors.draw` uses, for every token: [rows, vocabulary]."""
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
