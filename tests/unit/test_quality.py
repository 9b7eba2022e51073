"""`make quality`: refused options, and KL divergence, agreement and loss against cases computed by hand."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from perf.quality.__main__ import main
from perf.quality.divergence import Tokens, compare, joined, perplexity, summary


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model somewhere", "--model needs --text (with make: MODEL needs TEXT)"),
        ("--context 1", "--context is 1; a row needs 2 tokens at least"),
        ("--text absent.txt", "quality: can't read absent.txt: No such file"),
    ],
)
def test_unusable_options_are_refused_in_one_line_before_anything_is_loaded(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["quality", *arguments.split()])
    with pytest.raises(SystemExit) as end:
        main()
    # argparse writes its message itself; the interpreter writes the other kind.
    assert message in (end.value.code if isinstance(end.value.code, str) else capsys.readouterr().err.splitlines()[-1])


def test_figures_of_two_tokens_equal_those_by_hand() -> None:
    # P = (1/2, 1/2), Q = (1/4, 3/4): KL = 1/2 log(1/2 / 1/4) + 1/2 log(1/2 / 3/4) = log 2 - 1/2 log 3.
    expected, got = torch.tensor([[0.5, 0.5]] * 2).log(), torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
    # Adding a constant to all logits changes no distribution.
    tokens = compare(expected + 3, got - 1, torch.tensor([0, 0]))
    assert tokens.divergence.tolist() == pytest.approx([math.log(2) - 0.5 * math.log(3), 0], abs=1e-6)
    assert tokens.loss.tolist() == pytest.approx([math.log(4), math.log(2)], abs=1e-6)
    assert tokens.reference_loss.tolist() == pytest.approx([math.log(2)] * 2, abs=1e-6)
    # The best token is compared, not its probability.
    assert tokens.agrees.tolist() == [False, True]


@pytest.mark.parametrize(
    ("reference", "candidate", "expected"),
    [
        ([9.0, 0.0, 0.0], [0.0, 0.0, 0.0], math.log(3)),
        ([0.0, 0.0, 0.0], [9.0, 0.0, 0.0], 6 - math.log(3)),
        # A token of probability 0 adds nothing.
        ([0.0, 0.0, -math.inf], [0.0, 0.0, 0.0], math.log(1.5)),
    ],
)
def test_the_divergence_is_from_the_reference_to_the_candidate(
    reference: list[float], candidate: list[float], expected: float
) -> None:
    tokens = compare(torch.tensor([reference]), torch.tensor([candidate]), torch.tensor([0]))
    assert tokens.divergence.item() == pytest.approx(expected, abs=0.01)


def test_the_summary_equals_the_one_by_hand() -> None:
    first = [torch.tensor([one]) for one in (1.0, 1.5, 0.1, True)]
    others = [torch.tensor(pair) for pair in ([2.0, 3.0], [2.0, 4.0], [0.3, 0.2], [True, False])]
    tokens = joined([Tokens(*first), Tokens(*others)])
    assert perplexity(tokens.reference_loss) == pytest.approx(math.exp(2))
    assert summary(tokens) == {
        "perplexity": round(math.exp(2.5), 4),
        "kl_nats": {"mean": 0.2, "p99": 0.3, "max": 0.3},
        "top1_agreement": 0.666667,
        "loss_difference": {"mean": 0.5, "standard_error": 0.28868},
    }
