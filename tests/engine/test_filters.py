"""Top-k and top-p on random logits against transformers' own; the draw on a CPU gives the tokens of that by sorting."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from llama_engine.sampling import filters as cpu_sampling
from llama_engine.sampling.filters import (
    apply_temperature,
    draw,
    draw_on_cpu,
    keep_min_p,
    keep_top_k_top_p,
    position_keys,
)
from torch import Tensor
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

ROWS, VOCABULARY = 64, 300
NO_TOKENS = torch.LongTensor(1, 0)

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@pytest.fixture
def logits() -> torch.Tensor:
    scales = torch.logspace(-2, 2, ROWS)[:, None]
    return torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(20)) * scales


def _uniform(low: float, high: float, randomness: torch.Generator, rows: int = ROWS) -> torch.Tensor:
    return low + (high - low) * torch.rand(rows, generator=randomness)


def _top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """As transformers computes it, row by row."""
    rows = []
    for row in range(len(logits)):
        masked = TopKLogitsWarper(int(top_k[row]))(NO_TOKENS, logits[row : row + 1])
        rows.append(TopPLogitsWarper(float(top_p[row]))(NO_TOKENS, masked) if top_p[row] < 1 else masked)
    return torch.cat(rows)


@pytest.mark.parametrize("seed", range(20))
def test_top_k_and_top_p_keep_the_tokens_of_transformers(seed: int) -> None:
    """On logits from nearly flat to nearly certain, with every combination of top-k and top-p on and off."""
    source = torch.Generator().manual_seed(seed)
    rows, vocabulary = 8, (300, 1000, 3072)[seed % 3]
    logits = torch.randn(rows, vocabulary, generator=source) * float(_uniform(0.01, 6, source, 1))
    top_k = torch.randint(1, vocabulary + 1, (rows,), generator=source)
    top_k[torch.rand(rows, generator=source) < 0.4] = vocabulary
    top_p = _uniform(0.01, 0.99, source, rows)
    top_p[torch.rand(rows, generator=source) < 0.3] = 1.0
    masked = keep_top_k_top_p(logits, top_k, top_p)
    assert torch.equal(masked, _top_k_top_p(logits, top_k, top_p))
    for single in (slice(row, row + 1) for row in range(rows)):
        assert torch.equal(masked[single], keep_top_k_top_p(logits[single], top_k[single], top_p[single]))


@pytest.mark.parametrize(("top_k", "top_p"), [(2, 1.0), (5, 0.5)])
def test_ties_with_the_worst_token_kept_are_kept(top_k: int, top_p: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    masked = keep_top_k_top_p(logits, torch.tensor([top_k]), torch.tensor([top_p]))
    assert masked.isfinite().tolist() == [[True, True, True, True, False]]


@pytest.mark.parametrize(("top_k", "top_p"), [(VOCABULARY, 1e-45), (VOCABULARY, 1e-7), (VOCABULARY, 0.5), (1, 1.0)])
def test_the_best_token_is_always_kept(logits: torch.Tensor, top_k: int, top_p: float) -> None:
    masked = keep_top_k_top_p(logits, torch.full((ROWS,), top_k), torch.full((ROWS,), top_p))
    assert torch.equal(masked.argmax(-1), logits.argmax(-1))
    if top_k == 1:
        assert (masked.isfinite().sum(-1) == 1).all()


def _keys(rows: int, position: int = 0) -> Tensor:
    return torch.from_numpy(position_keys(np.arange(rows, dtype=np.uint64), np.full(rows, position)))


def _random(seed: int, vocabulary: int) -> Arguments:
    """Logits from nearly flat to nearly certain, some tied or ruled out, and every combination of the parameters."""
    source = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(ROWS, generator=source)

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
    return logits, temperature, top_k, top_p, _keys(ROWS, seed)


@pytest.mark.parametrize("vocabulary", [2, 5, 300, 3072, 20_000])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_those_of_the_draw_by_sorting(vocabulary: int, seed: int) -> None:
    logits, temperature, top_k, top_p, keys = arguments = _random(seed, vocabulary)
    min_p = torch.rand(ROWS, generator=torch.Generator().manual_seed(seed)) ** 4
    min_p[::3], min_p[1] = 0.0, 1.0
    warm = keep_min_p(apply_temperature(logits, temperature), min_p.log())
    expected = draw(keep_top_k_top_p(warm, top_k, top_p), keys)
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
    monkeypatch.setattr(cpu_sampling, name, value)
    with patch.object(cpu_sampling, "draw", wraps=draw) as sorting:
        assert torch.equal(draw_on_cpu(*arguments), expected)
    assert sorting.call_count == 1
