"""Seeded draws: the right distribution over seeds and over positions, and independence of neighbours in either.

`draw_on_cpu` gives the tokens of the draw by sorting. Seeds are fixed, so the p-values are the same at every run.
"""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from llama_engine.sampling.draw import draw, draw_on_cpu, philox4x32, position_keys
from llama_engine.sampling.filters import filtered
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

COUNT = 40_000
PROBABILITIES = np.array([0.35, 0.2, 0.12, 0.1, 0.08, 0.06, 0.05, 0.03, 0.0095, 0.0005])
IMPLAUSIBLE = 1e-4
ROWS = 64
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

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _keys(count: int, first: int = 0, position: int = 0) -> Tensor:
    """Return the keys of `count` consecutive seeds at one position."""
    seeds = np.arange(count, dtype=np.uint64) + np.uint64(first)
    return torch.from_numpy(position_keys(seeds, np.full(count, position)))


def _draws(keys: Tensor) -> NDArray[np.int64]:
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


def _random(seed: int, vocabulary: int) -> Arguments:
    """Logits from nearly flat to nearly certain, some tied or ruled out, and every combination of the parameters."""
    source = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(ROWS).uniform_(low, high, generator=source)

    logits = torch.randn(ROWS, vocabulary, generator=source) * uniform(0, 8)[:, None]
    logits[::7] = logits[::7].round()
    logits[::5, 3:] = torch.where(logits[::5, 3:] < -1, -torch.inf, logits[::5, 3:])
    temperature = uniform(0.05, 2)
    temperature[uniform(0, 1) < 0.1] = 1e-45
    top_k = torch.randint(1, vocabulary + 1, (ROWS,), generator=source)
    top_k = torch.where(uniform(0, 1) < 0.3, top_k.clamp(max=50), top_k)
    top_k[uniform(0, 1) < 0.5] = vocabulary
    top_p = torch.where(uniform(0, 1) < 0.2, uniform(1e-6, 0.05), uniform(0.05, 0.999))
    top_p[uniform(0, 1) < 0.3] = 1.0
    return logits, temperature, top_k, top_p, _keys(ROWS, position=seed)


@pytest.mark.parametrize(("vocabulary", "seed"), [(2, 0), (5, 1), (300, 2), (3072, 0), (3072, 3), (20_000, 1)])
def test_tokens_are_those_of_the_draw_by_sorting(vocabulary: int, seed: int) -> None:
    logits, temperature, top_k, top_p, keys = arguments = _random(seed, vocabulary)
    min_p = torch.rand(ROWS, generator=torch.Generator().manual_seed(seed)) ** 4
    min_p[::3], min_p[1] = 0.0, 1.0
    expected = draw(filtered(logits, temperature, top_k, top_p, min_p.log()), keys)
    drawn = draw_on_cpu(*arguments, min_p.log())
    assert torch.equal(drawn, expected)
    # A min_p of 0 is off, and at 1 only the best token is left.
    assert torch.equal(drawn[::3], draw_on_cpu(*arguments)[::3])
    assert logits[1, drawn[1]] == logits[1].max()
    for row in range(0, ROWS, 9):
        alone = [argument[row : row + 1] for argument in (*arguments, min_p.log())]
        assert draw_on_cpu(*alone).tolist() == [int(drawn[row])]


@pytest.mark.parametrize(("name", "value"), [("MARGIN", 0.3), ("EXPECTED_FINISHERS", 0.5), ("MIN_TOP_P", 1.0)])
def test_undecided_rows_are_drawn_by_sorting(name: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _random(5, 3072)
    expected = draw_on_cpu(*arguments)
    monkeypatch.setattr(f"llama_engine.sampling.draw.{name}", value)
    with patch("llama_engine.sampling.draw.draw", wraps=draw) as sorting:
        assert torch.equal(draw_on_cpu(*arguments), expected)
    assert sorting.call_count == 1
