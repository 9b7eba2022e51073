"""Seeded draws: the right distribution over seeds and over positions, and independence of neighbours in either.

Seeds are fixed, so the p-values are the same at every run.
"""

import numpy as np
import torch
from llama_engine.sampling.filters import draw, philox4x32, position_keys
from numpy.typing import NDArray
from scipy import stats

COUNT = 40_000
PROBABILITIES = np.array([0.35, 0.2, 0.12, 0.1, 0.08, 0.06, 0.05, 0.03, 0.0095, 0.0005])
IMPLAUSIBLE = 1e-4
ONES = 0xFFFFFFFF

# Counter, key and result from the authors' library, Random123 (kat_vectors).
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def _keys(count: int, first: int = 0, position: int = 0) -> torch.Tensor:
    """Return the keys of `count` consecutive seeds at one position."""
    seeds = np.arange(count, dtype=np.uint64) + np.uint64(first)
    return torch.from_numpy(position_keys(seeds, np.full(count, position)))


def _draws(keys: torch.Tensor) -> NDArray[np.int64]:
    logits = torch.from_numpy(np.log(PROBABILITIES)).float().expand(len(keys), -1)
    tokens: NDArray[np.int64] = draw(logits, keys).numpy()
    return tokens


def _over_seeds(first: int, position: int = 0) -> NDArray[np.int64]:
    return _draws(_keys(COUNT, first, position))


def _over_positions(seed: int) -> NDArray[np.int64]:
    return _draws(torch.from_numpy(position_keys(np.full(COUNT, seed, dtype=np.uint64), np.arange(COUNT))))


def test_philox_gives_the_known_answers() -> None:
    counters = np.array([counter for counter, _, _ in KNOWN_ANSWERS], dtype=np.uint64)
    keys = np.array([low | high << 32 for _, (low, high), _ in KNOWN_ANSWERS], dtype=np.uint64)
    assert philox4x32(keys, counters).tolist() == [list(answer) for *_, answer in KNOWN_ANSWERS]


def test_position_keys_are_distinct() -> None:
    seeds = np.array([0, 1, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1], dtype=np.uint64)
    words = np.concatenate([position_keys(seeds, np.full(len(seeds), position)) for position in range(2000)])
    assert words.min() >= 0
    assert words.max() < 2**32
    assert len(np.unique(words, axis=0)) == len(words)
    alone = [position_keys(seeds[row : row + 1], np.array([10]))[0].tolist() for row in range(len(seeds))]
    assert position_keys(seeds, np.full(len(seeds), 10)).tolist() == alone


def test_draws_have_the_distribution_of_the_logits() -> None:
    series = [_over_seeds(first, position) for first in (0, 2**32 - 100, 2**63) for position in (0, 1, 500)]
    for tokens in [*series, *map(_over_positions, (0, 1, 2**32, 2**64 - 1))]:
        counts = np.bincount(tokens, minlength=len(PROBABILITIES))
        assert stats.chisquare(counts, PROBABILITIES * COUNT).pvalue > IMPLAUSIBLE


def test_a_last_bit_in_the_logits_changes_almost_no_draw() -> None:
    """The point of the exponential race: noise of float32 size changes a draw only if two candidates nearly tie."""
    generator, keys = torch.Generator().manual_seed(0), _keys(COUNT // 10)
    logits = 3 * torch.randn(COUNT // 10, 1000, generator=generator)
    perturbed = logits * (1 + 2e-7 * torch.randn(logits.shape, generator=generator))
    assert (draw(logits, keys) != draw(perturbed, keys)).sum() <= 1
