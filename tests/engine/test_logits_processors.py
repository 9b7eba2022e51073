"""Every logits processor against transformers' own, row by row, on random logits."""

import pytest
import torch
from llama_engine.sampling import logits_processors
from llama_engine.sampling.logits_processors import (
    apply_temperature,
    draw,
    keep_top_k_top_p,
    penalize_output,
    penalize_repetition,
)
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

ROWS, VOCABULARY = 64, 300
NO_TOKENS = torch.zeros(1, 0, dtype=torch.long)


@pytest.fixture
def randomness() -> torch.Generator:
    return torch.Generator().manual_seed(20)


@pytest.fixture
def logits(randomness: torch.Generator) -> torch.Tensor:
    scales = torch.logspace(-2, 2, ROWS)[:, None]
    return torch.randn(ROWS, VOCABULARY, generator=randomness) * scales


def uniform(low: float, high: float, randomness: torch.Generator) -> torch.Tensor:
    return low + (high - low) * torch.rand(ROWS, generator=randomness)


def expected_top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    rows = []
    for row in range(len(logits)):
        kept = TopKLogitsWarper(int(top_k[row]))(NO_TOKENS, logits[row : row + 1])
        rows.append(TopPLogitsWarper(float(top_p[row]))(NO_TOKENS, kept) if top_p[row] < 1 else kept)
    return torch.cat(rows)


def test_the_repetition_penalty_is_that_of_transformers(logits: torch.Tensor, randomness: torch.Generator) -> None:
    penalty = uniform(0.2, 3.0, randomness)
    penalty[0] = 1.0
    tokens = torch.randint(VOCABULARY, (ROWS, 40), generator=randomness)
    seen = torch.zeros(ROWS, VOCABULARY, dtype=torch.bool).scatter(1, tokens, True)
    ours = penalize_repetition(logits, seen, penalty)
    assert torch.equal(ours[0], logits[0])
    for row in range(ROWS):
        theirs = RepetitionPenaltyLogitsProcessor(penalty[row].item())(tokens[row : row + 1], logits[row : row + 1])
        torch.testing.assert_close(ours[row], theirs[0], rtol=2e-7, atol=0)


def test_frequency_and_presence_penalties_are_the_formula(logits: torch.Tensor, randomness: torch.Generator) -> None:
    frequency, presence = uniform(-2, 2, randomness), uniform(-2, 2, randomness)
    counts = torch.randint(4, (ROWS, VOCABULARY), generator=randomness, dtype=torch.int32)
    ours = penalize_output(logits, counts, frequency, presence)
    for row in range(0, ROWS, 9):
        for token in range(0, VOCABULARY, 7):
            count = int(counts[row, token])
            expected = float(logits[row, token]) - float(frequency[row]) * count - float(presence[row]) * (count > 0)
            assert float(ours[row, token]) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_the_temperature_is_that_of_transformers(logits: torch.Tensor, randomness: torch.Generator) -> None:
    temperature = uniform(0.05, 2.0, randomness)
    ours = apply_temperature(logits, temperature).softmax(-1)
    for row in range(ROWS):
        theirs = TemperatureLogitsWarper(temperature[row].item())(NO_TOKENS, logits[row : row + 1]).softmax(-1)
        torch.testing.assert_close(ours[row], theirs[0], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("off", ["neither", "top_k", "top_p"])
def test_top_k_and_top_p_keep_the_tokens_that_transformers_keeps(
    logits: torch.Tensor, randomness: torch.Generator, off: str
) -> None:
    logits[5, :50] = logits[5, 60]  # ties at the boundary
    top_k = torch.randint(1, VOCABULARY + 1, (ROWS,), generator=randomness)
    top_p = uniform(0.01, 0.999, randomness)
    if off == "top_k":
        top_k[:] = VOCABULARY
    elif off == "top_p":
        top_p[:] = 1.0
    assert torch.equal(keep_top_k_top_p(logits, top_k, top_p), expected_top_k_top_p(logits, top_k, top_p))


@pytest.mark.parametrize("seed", range(40))
def test_few_candidates_and_the_whole_vocabulary_keep_and_draw_the_same_tokens(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On logits from nearly flat to nearly certain, with every combination of top-k and top-p on and off."""
    source = torch.Generator().manual_seed(seed)
    rows, vocabulary = 8, (300, 1000, 3072)[seed % 3]
    logits = torch.randn(rows, vocabulary, generator=source) * float(torch.rand(1, generator=source) * 6 + 0.01)
    some_k = torch.randint(1, vocabulary + 1, (rows,), generator=source)
    top_k = torch.where(torch.rand(rows, generator=source) < 0.4, vocabulary, some_k)
    some_p = torch.rand(rows, generator=source) * 0.98 + 0.01
    top_p = torch.where(torch.rand(rows, generator=source) < 0.3, 1.0, some_p)
    keys = torch.randint(0, 2**32, (rows, 2), generator=source)

    kept = keep_top_k_top_p(logits, top_k, top_p)
    drawn = draw(kept, keys)
    assert torch.equal(kept, expected_top_k_top_p(logits, top_k, top_p))
    for row in range(rows):
        one = slice(row, row + 1)
        assert torch.equal(kept[one], keep_top_k_top_p(logits[one], top_k[one], top_p[one]))
    monkeypatch.setattr(logits_processors, "CANDIDATES", 10**6)
    assert torch.equal(kept, keep_top_k_top_p(logits, top_k, top_p))
    assert torch.equal(drawn, draw(kept, keys))


def test_ties_with_the_worst_token_kept_are_kept() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    kept = keep_top_k_top_p(logits, torch.tensor([2]), torch.tensor([1.0]))
    assert kept.isfinite().tolist() == [[True, True, True, True, False]]


@pytest.mark.parametrize(("top_k", "top_p"), [(VOCABULARY, 1e-45), (VOCABULARY, 1e-7), (VOCABULARY, 0.5), (1, 1.0)])
def test_the_best_token_is_always_kept(logits: torch.Tensor, top_k: int, top_p: float) -> None:
    kept = keep_top_k_top_p(logits, torch.full((ROWS,), top_k), torch.full((ROWS,), top_p))
    assert torch.equal(kept.argmax(-1), logits.argmax(-1))
    if top_k == 1:
        assert (kept.isfinite().sum(-1) == 1).all()


def test_masked_tokens_stay_masked(logits: torch.Tensor) -> None:
    logits[:, ::2] = -torch.inf
    unseen = torch.zeros(ROWS, VOCABULARY, dtype=torch.bool)
    warm = apply_temperature(logits, torch.full((ROWS,), 1e-3))
    kept = keep_top_k_top_p(warm, torch.full((ROWS,), VOCABULARY), torch.full((ROWS,), 0.9999))
    assert (kept[:, ::2] == -torch.inf).all()
    assert not penalize_repetition(logits, unseen, torch.full((ROWS,), 2.0))[:, ::2].isfinite().any()
