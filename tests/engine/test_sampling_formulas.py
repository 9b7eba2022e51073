"""Each sampling formula against transformers' own logits processor, row by row, on random logits."""

import pytest
import torch
from llama_engine.sampling.logits_processors import (
    apply_temperature,
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


@pytest.fixture
def randomness() -> torch.Generator:
    return torch.Generator().manual_seed(20)


@pytest.fixture
def logits(randomness: torch.Generator) -> torch.Tensor:
    scales = torch.logspace(-2, 2, ROWS)[:, None]
    return torch.randn(ROWS, VOCABULARY, generator=randomness) * scales


def _uniform(low: float, high: float, randomness: torch.Generator) -> torch.Tensor:
    return low + (high - low) * torch.rand(ROWS, generator=randomness)


def test_repetition_penalty_is_not_that_of_transformers(logits: torch.Tensor, randomness: torch.Generator) -> None:
    penalty = _uniform(0.2, 3.0, randomness)
    penalty[0] = 1.0
    written = torch.randint(VOCABULARY, (ROWS, 40), generator=randomness)
    seen = torch.zeros(ROWS, VOCABULARY, dtype=torch.bool).scatter(1, written, True)
    ours = penalize_repetition(logits, seen, penalty)
    assert torch.equal(ours[0], logits[0])
    for row in range(ROWS):
        theirs = RepetitionPenaltyLogitsProcessor(penalty[row].item())(written[row : row + 1], logits[row : row + 1])
        torch.testing.assert_close(ours[row], theirs[0], rtol=2e-7, atol=0)


def test_frequency_or_presence_penalty_is_not_the_formula(logits: torch.Tensor, randomness: torch.Generator) -> None:
    frequency, presence = _uniform(-2, 2, randomness), _uniform(-2, 2, randomness)
    counts = torch.randint(4, (ROWS, VOCABULARY), generator=randomness, dtype=torch.int32)
    ours = penalize_output(logits, counts, frequency, presence)
    for row in range(0, ROWS, 9):
        for token in range(0, VOCABULARY, 7):
            count = int(counts[row, token])
            plain = float(logits[row, token]) - float(frequency[row]) * count - float(presence[row]) * (count > 0)
            assert float(ours[row, token]) == pytest.approx(plain, rel=1e-5, abs=1e-5)


def test_temperature_is_not_that_of_transformers(logits: torch.Tensor, randomness: torch.Generator) -> None:
    temperature = _uniform(0.05, 2.0, randomness)
    ours = apply_temperature(logits, temperature).softmax(-1)
    nothing = torch.zeros(1, 1, dtype=torch.long)
    for row in range(ROWS):
        theirs = TemperatureLogitsWarper(temperature[row].item())(nothing, logits[row : row + 1]).softmax(-1)
        torch.testing.assert_close(ours[row], theirs[0], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("off", ["neither", "top_k", "top_p"])
def test_top_k_and_top_p_keep_other_tokens_than_transformers(
    logits: torch.Tensor, randomness: torch.Generator, off: str
) -> None:
    logits[5, :50] = logits[5, 60]  # ties at the border
    top_k = torch.randint(1, VOCABULARY + 1, (ROWS,), generator=randomness)
    top_p = _uniform(0.01, 0.999, randomness)
    if off == "top_k":
        top_k[:] = VOCABULARY
    elif off == "top_p":
        top_p[:] = 1.0
    ours = keep_top_k_top_p(logits, top_k, top_p)
    nothing = torch.zeros(1, 1, dtype=torch.long)
    for row in range(ROWS):
        theirs = TopKLogitsWarper(int(top_k[row]))(nothing, logits[row : row + 1])
        if off != "top_p":
            theirs = TopPLogitsWarper(top_p[row].item())(nothing, theirs)
        assert torch.equal(ours[row], theirs[0]), f"row {row}: top_k {top_k[row]}, top_p {top_p[row]}"


@pytest.mark.parametrize("top_p", [1e-45, 1e-7, 0.5])
def test_the_smallest_top_p_or_top_k_leaves_nothing_to_choose_from(logits: torch.Tensor, top_p: float) -> None:
    best = logits.argmax(-1)
    kept = keep_top_k_top_p(logits, torch.full((ROWS,), VOCABULARY), torch.full((ROWS,), top_p))
    assert torch.equal(kept.argmax(-1), best)
    kept = keep_top_k_top_p(logits, torch.ones(ROWS, dtype=torch.long), torch.ones(ROWS))
    assert torch.equal(kept.isfinite().sum(-1), torch.ones(ROWS, dtype=torch.long))
    assert torch.equal(kept.argmax(-1), best)


def test_masked_tokens_come_back(logits: torch.Tensor) -> None:
    logits[:, ::2] = -torch.inf
    seen = torch.ones(ROWS, VOCABULARY, dtype=torch.bool)
    warm = apply_temperature(logits, torch.full((ROWS,), 1e-3))
    kept = keep_top_k_top_p(warm, torch.full((ROWS,), VOCABULARY), torch.full((ROWS,), 0.9999))
    assert (kept[:, ::2] == -torch.inf).all()
    assert not penalize_repetition(logits, ~seen, torch.full((ROWS,), 2.0))[:, ::2].isfinite().any()
