"""Top-k and top-p: transformers' sets, and the same whether a few candidates decide or the whole vocabulary."""

import pytest
import torch
from llama_engine.sampling import logits_processors as sampling
from llama_engine.sampling.logits_processors import draw, keep_top_k_top_p
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

ROWS = 8


def _mixes(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits from nearly flat to nearly certain, with every combination of top-k and top-p on and off."""
    source = torch.Generator().manual_seed(seed)
    vocabulary = (300, 1000, 3072)[seed % 3]
    logits = torch.randn(ROWS, vocabulary, generator=source) * float(torch.rand(1, generator=source) * 6 + 0.01)
    some_k = torch.randint(1, vocabulary + 1, (ROWS,), generator=source)
    top_k = torch.where(torch.rand(ROWS, generator=source) < 0.4, vocabulary, some_k)
    some_p = torch.rand(ROWS, generator=source) * 0.98 + 0.01
    return logits, top_k, torch.where(torch.rand(ROWS, generator=source) < 0.3, 1.0, some_p)


@pytest.mark.parametrize("seed", range(40))
def test_the_kept_tokens_are_not_those_of_transformers(seed: int) -> None:
    logits, top_k, top_p = _mixes(seed)
    for row, kept in enumerate(keep_top_k_top_p(logits, top_k, top_p)):
        ids = torch.zeros(1, 0, dtype=torch.long)
        expected = TopKLogitsWarper(int(top_k[row]))(ids, logits[row : row + 1])
        if top_p[row] < 1:
            expected = TopPLogitsWarper(float(top_p[row]))(ids, expected)
        assert torch.equal(kept, expected[0])


@pytest.mark.parametrize("seed", range(40))
def test_the_short_way_and_the_long_way_differ(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, top_k, top_p = _mixes(seed)
    keys = torch.randint(0, 2**32, (ROWS, 2), generator=torch.Generator().manual_seed(seed))
    short = keep_top_k_top_p(logits, top_k, top_p)
    drawn = draw(short, keys)
    monkeypatch.setattr(sampling, "CANDIDATES", 10**6)
    assert torch.equal(short, keep_top_k_top_p(logits, top_k, top_p))
    assert torch.equal(drawn, draw(short, keys))


def test_a_neighbour_that_needs_the_long_way_changes_a_row() -> None:
    for seed in range(20):
        logits, top_k, top_p = _mixes(seed)
        together = keep_top_k_top_p(logits, top_k, top_p)
        for row in range(ROWS):
            one = slice(row, row + 1)
            assert torch.equal(together[one], keep_top_k_top_p(logits[one], top_k[one], top_p[one]))


def test_which_of_two_equals_is_kept_is_chance() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    kept = keep_top_k_top_p(logits, torch.tensor([2]), torch.tensor([1.0]))
    assert kept.isfinite().tolist() == [[True, True, True, True, False]]
