"""Philox4x32-10: stateless random numbers, a function of (key, counter).

A sequence's random numbers depend on its seed and its step alone, not on the batch. Source of algorithm and constants:
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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


def step_keys(seeds: NDArray[np.uint64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return two random 32-bit words for each sequence's (seed, step): [batch, 2]."""
    counter = np.zeros((len(seeds), 4), dtype=np.uint64)
    counter[:, 0] = steps
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
