"""Two models over the same rows: the embedded checkpoint with itself and with INT8, and the perplexity of its card."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.engines import load
from engine.prompts import random_prompt
from llama_engine.model.loader import Checkpoint
from tqdm import tqdm

from perf.quality import divergence
from perf.quality.candidates import CANDIDATES, Candidate, measured
from perf.quality.divergence import both, perplexity

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rows(fp32: Checkpoint) -> list[list[int]]:
    """Five rows of unequal lengths, one longer than a pass of the head."""
    randomness = random.Random(11)
    lengths = [range(20, 40)] * 4 + [range(divergence.POSITIONS_AT_ONCE + 9, divergence.POSITIONS_AT_ONCE + 10)]
    return [list(random_prompt(fp32.tokenizer, length, randomness)[1]) for length in lengths]


def test_a_model_has_no_distance_from_itself(fp32: Checkpoint, rows: list[list[int]]) -> None:
    with tqdm(disable=True) as progress:
        tokens = both(fp32.model, fp32.model, rows, progress)
    assert tokens.divergence.count_nonzero() == 0
    assert tokens.agrees.all()
    assert len(tokens.loss) == sum(len(row) - 1 for row in rows)


def test_the_perplexity_equals_the_model_cards(
    fp32: Checkpoint, rows: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The training code is no installed package: it is imported from the repository's root.
    monkeypatch.syspath_prepend(str(ROOT))
    from models.train_pydoc_llama.perplexity import perplexity as of_the_card

    with tqdm(disable=True) as progress:
        tokens = both(fp32.model, fp32.model, rows, progress)
    assert perplexity(tokens.loss) == pytest.approx(of_the_card(fp32.model, rows, pad=3), rel=1e-5)


def test_the_positions_per_pass_do_not_change_the_result(
    fp32: Checkpoint, int8: Checkpoint, rows: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for positions in (7, 256):
        monkeypatch.setattr(divergence, "POSITIONS_AT_ONCE", positions)
        with tqdm(disable=True) as progress:
            found.append(both(fp32.model, int8.model, rows[:1], progress))
    assert torch.allclose(found[0].divergence, found[1].divergence, atol=1e-6)
    assert torch.allclose(found[0].loss, found[1].loss, atol=1e-5)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda one: one.key)
def test_int8_is_close_to_the_reference_but_not_equal(
    fp32: Checkpoint, rows: list[list[int]], candidate: Candidate
) -> None:
    loaded = load("int8", int8_threshold=f"{candidate.threshold:g}")
    with tqdm(disable=True) as progress:
        found = measured(candidate, fp32, loaded, rows, progress)
    assert list(found) == ["fp32", candidate.key]
    one: Any = found[candidate.key]
    reference: Any = found["fp32"]
    assert one["threshold"] == candidate.threshold
    assert abs(one["perplexity"] / reference["perplexity"] - 1) < 0.02
    assert 0 < one["kl_nats"]["mean"] < 0.01
    assert one["kl_nats"]["mean"] < one["kl_nats"]["p99"] <= one["kl_nats"]["max"]
    assert 0.9 < one["top1_agreement"] < 1


def test_an_empty_text_is_refused(fp32: Checkpoint) -> None:
    with tqdm(disable=True) as progress, pytest.raises(ValueError, match="no rows"):
        both(fp32.model, fp32.model, [], progress)
