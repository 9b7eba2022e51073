"""Log probabilities of tokens: the log softmax, ranks, and the most likely tokens of each row."""

import math

import pytest
import torch
from llama_engine.sampling.log_probs import log_probs_of

ROWS, VOCABULARY = 9, 500


@pytest.fixture
def logits() -> torch.Tensor:
    return 5 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(6))


def test_they_are_the_log_softmax_of_the_logits(logits: torch.Tensor) -> None:
    tokens = torch.arange(0, VOCABULARY, VOCABULARY // ROWS)[:ROWS]
    expected = logits.double().log_softmax(-1)
    result = log_probs_of(logits, tokens, [row % 4 for row in range(ROWS)])
    for row, log_probs in enumerate(result):
        token = int(tokens[row])
        assert log_probs.token == token
        assert math.isclose(log_probs.log_prob, float(expected[row, token]), rel_tol=1e-6)
        assert log_probs.rank == 1 + int((expected[row] > expected[row, token]).sum())
        best = expected[row].topk(row % 4)
        assert [best_token for best_token, _ in log_probs.top] == best.indices.tolist()
        assert [value for _, value in log_probs.top] == pytest.approx(best.values.tolist(), rel=1e-6)


def test_equally_likely_tokens_have_the_same_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]]).expand(4, -1)
    assert [log_probs.rank for log_probs in log_probs_of(logits, torch.arange(4), [0] * 4)] == [4, 1, 1, 3]


def test_no_more_tokens_are_reported_than_there_are() -> None:
    (log_probs,) = log_probs_of(torch.tensor([[1.0, 2.0]]), torch.tensor([0]), [20])
    assert [token for token, _ in log_probs.top] == [1, 0]
