"""Seeded draws: the right distribution over seeds and over steps, and no dependence between neighbours in either.

Seeds are fixed, so these tests give the same p-values every time.
"""

import numpy as np
import pytest
import torch
from llama_engine.sampling.logits_processors import draw
from llama_engine.sampling.philox import step_keys
from numpy.typing import NDArray
from scipy import stats

COUNT = 40_000
PROBABILITIES = np.array([0.35, 0.2, 0.12, 0.1, 0.08, 0.06, 0.05, 0.03, 0.0095, 0.0005])
IMPLAUSIBLE = 1e-4


def _draws(
    seeds: NDArray[np.uint64], steps: NDArray[np.int64], probabilities: NDArray[np.float64]
) -> NDArray[np.int64]:
    keys = torch.from_numpy(step_keys(seeds, steps))
    logits = torch.from_numpy(np.log(probabilities)).float().expand(len(keys), -1)
    tokens: NDArray[np.int64] = draw(logits, keys).numpy()
    return tokens


def _over_seeds(first: int, step: int = 0) -> NDArray[np.int64]:
    seeds = np.arange(COUNT, dtype=np.uint64) + np.uint64(first)
    return _draws(seeds, np.full(COUNT, step), PROBABILITIES)


def _over_steps(seed: int) -> NDArray[np.int64]:
    return _draws(np.full(COUNT, seed, dtype=np.uint64), np.arange(COUNT), PROBABILITIES)


@pytest.mark.parametrize("first", [0, 2**32 - 100, 2**63])
@pytest.mark.parametrize("step", [0, 1, 500])
def test_the_distribution_over_seeds_is_wrong(first: int, step: int) -> None:
    counts = np.bincount(_over_seeds(first, step), minlength=len(PROBABILITIES))
    assert stats.chisquare(counts, PROBABILITIES * COUNT).pvalue > IMPLAUSIBLE


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
def test_the_distribution_over_steps_is_wrong(seed: int) -> None:
    counts = np.bincount(_over_steps(seed), minlength=len(PROBABILITIES))
    assert stats.chisquare(counts, PROBABILITIES * COUNT).pvalue > IMPLAUSIBLE


def _dependence(first: NDArray[np.int64], second: NDArray[np.int64]) -> float:
    """The p-value of two series being independent; the rare tokens count as one."""
    table = np.zeros((7, 7), dtype=np.int64)
    np.add.at(table, (np.minimum(first, 6), np.minimum(second, 6)), 1)
    return float(stats.chi2_contingency(table).pvalue)


def test_neighbouring_seeds_or_steps_depend_on_each_other() -> None:
    by_seed, by_step = _over_seeds(0), _over_steps(0)
    assert _dependence(by_seed[:-1], by_seed[1:]) > IMPLAUSIBLE
    assert _dependence(by_seed, _over_seeds(2**32)) > IMPLAUSIBLE
    assert _dependence(by_step[:-1], by_step[1:]) > IMPLAUSIBLE
    assert _dependence(by_step, _over_steps(1)) > IMPLAUSIBLE
    assert _dependence(by_seed, by_step) > IMPLAUSIBLE


def test_the_tokens_of_a_large_vocabulary_are_not_alike() -> None:
    """All tokens equally likely: neither blocks of ids nor ids of one remainder may be preferred."""
    vocabulary, rows = 16_032, 1_200
    keys = torch.from_numpy(step_keys(np.arange(rows, dtype=np.uint64), np.zeros(rows, dtype=np.int64)))
    flat = torch.zeros(1, vocabulary)
    tokens = np.concatenate([draw(flat.expand(50, -1), part).numpy() for part in torch.split(keys, 50)])
    for label, cells in (("block", tokens // (vocabulary // 24)), ("remainder", tokens % 24)):
        assert stats.chisquare(np.bincount(cells, minlength=24)).pvalue > IMPLAUSIBLE, label


def test_noise_of_two_tokens_is_shared() -> None:
    """Of ten equal tokens one is ruled out: the others keep what they had won, and share what it had won equally."""
    keys = torch.from_numpy(step_keys(np.arange(COUNT, dtype=np.uint64), np.zeros(COUNT, dtype=np.int64)))
    logits = torch.zeros(COUNT, 10)
    before = draw(logits, keys).numpy()
    logits[:, 4] = -torch.inf
    after = draw(logits, keys).numpy()
    assert (after[before != 4] == before[before != 4]).all()
    counts = np.bincount(after[before == 4], minlength=10)
    assert counts[4] == 0
    assert stats.chisquare(np.delete(counts, 4)).pvalue > IMPLAUSIBLE


def test_a_last_bit_in_the_logits_changes_many_draws() -> None:
    """The point of the exponential race: noise of float32 size changes a draw only where two candidates nearly tie."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(COUNT // 10, 1000, generator=generator)
    keys = torch.from_numpy(step_keys(np.arange(COUNT // 10, dtype=np.uint64), np.zeros(COUNT // 10, dtype=np.int64)))
    shaken = logits * (1 + 2e-7 * torch.randn(logits.shape, generator=generator))
    assert (draw(logits, keys) != draw(shaken, keys)).sum() <= 1


def test_a_draw_is_ruled_out_token_or_not_a_number() -> None:
    keys = torch.from_numpy(step_keys(np.arange(COUNT, dtype=np.uint64), np.zeros(COUNT, dtype=np.int64)))
    logits = torch.full((COUNT, 5), -torch.inf)
    logits[:, 3] = -1e30
    assert (draw(logits, keys) == 3).all()
