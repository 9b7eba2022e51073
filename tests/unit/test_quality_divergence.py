"""KL divergence, agreement and loss against cases computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from perf.quality.divergence import Tokens, compare, perplexity, summary


def test_a_distribution_has_no_distance_from_itself() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 50, dtype=torch.float16)
    tokens = compare(logits, logits, torch.arange(7))
    assert tokens.divergence.tolist() == [0.0] * 7
    assert tokens.agrees.all()
    assert torch.equal(tokens.loss, tokens.reference_loss)


def test_the_divergence_of_two_tokens_equals_the_one_by_hand() -> None:
    # P = (1/2, 1/2), Q = (1/4, 3/4): KL = 1/2 log(1/2 / 1/4) + 1/2 log(1/2 / 3/4) = log 2 - 1/2 log 3.
    expected, got = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    # Adding a constant to all logits changes no distribution.
    tokens = compare(expected + 3, got - 1, torch.tensor([0]))
    assert tokens.divergence.item() == pytest.approx(math.log(2) - 0.5 * math.log(3), abs=1e-6)
    assert tokens.loss.item() == pytest.approx(math.log(4), abs=1e-6)
    assert tokens.reference_loss.item() == pytest.approx(math.log(2), abs=1e-6)


def test_the_divergence_is_from_the_reference_to_the_candidate() -> None:
    peaked, flat = torch.tensor([[9.0, 0.0, 0.0]]), torch.zeros(1, 3)
    one, other = (compare(*pair, torch.tensor([0])).divergence.item() for pair in ((peaked, flat), (flat, peaked)))
    assert one == pytest.approx(math.log(3), abs=0.01)
    assert other > 4


def test_a_token_of_probability_zero_adds_nothing() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    tokens = compare(logits, torch.zeros(1, 3), torch.tensor([0]))
    assert tokens.divergence.item() == pytest.approx(math.log(1.5))


def test_agreement_compares_the_best_tokens() -> None:
    reference = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    candidate = torch.tensor([[5.0, 0.0, 4.0], [1.0, 1.1, 0.0]])
    assert compare(reference, candidate, torch.tensor([0, 0])).agrees.tolist() == [True, False]


def test_the_summary_equals_the_one_by_hand() -> None:
    first = [torch.tensor([one]) for one in (1.0, 1.5, 0.1, True)]
    others = [torch.tensor(pair) for pair in ([2.0, 3.0], [2.0, 4.0], [0.3, 0.2], [True, False])]
    tokens = Tokens.joined([Tokens(*first), Tokens(*others)])
    assert perplexity(tokens.reference_loss) == pytest.approx(math.exp(2))
    assert summary(tokens) == {
        "perplexity": round(math.exp(2.5), 4),
        "kl_nats": {"mean": 0.2, "p99": 0.3, "max": 0.3},
        "top1_agreement": 0.666667,
        "loss_difference": {"mean": 0.5, "standard_error": 0.28868},
    }
