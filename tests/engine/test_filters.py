"""Top-k and top-p on random logits against transformers' own."""

import pytest
import torch
from llama_engine.sampling.filters import keep_top_k_top_p
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

NO_TOKENS = torch.LongTensor(1, 0)


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
    logits = torch.randn(rows, vocabulary, generator=source) * torch.empty(1).uniform_(0.01, 6, generator=source)
    top_k = torch.randint(1, vocabulary + 1, (rows,), generator=source)
    top_k[torch.rand(rows, generator=source) < 0.4] = vocabulary
    top_p = torch.empty(rows).uniform_(0.01, 0.99, generator=source)
    top_p[torch.rand(rows, generator=source) < 0.3] = 1.0
    # Of which the likeliest token is left.
    top_k[0], top_p[0], top_k[1] = vocabulary, 1e-45, 1
    masked = keep_top_k_top_p(logits, top_k, top_p)
    assert torch.equal(masked, _top_k_top_p(logits, top_k, top_p))
    for single in (slice(row, row + 1) for row in range(rows)):
        assert torch.equal(masked[single], keep_top_k_top_p(logits[single], top_k[single], top_p[single]))


@pytest.mark.parametrize(("top_k", "top_p"), [(2, 1.0), (5, 0.5)])
def test_ties_with_the_worst_token_kept_are_kept(top_k: int, top_p: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    masked = keep_top_k_top_p(logits, torch.tensor([top_k]), torch.tensor([top_p]))
    assert masked.isfinite().tolist() == [[True, True, True, True, False]]
