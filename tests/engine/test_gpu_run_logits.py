"""The comparison of logits accepts correct ones and detects a mistake in the slots."""

from __future__ import annotations

import pytest
import torch
from llama_engine.model.loader import Checkpoint
from llama_engine.model.model_runner import ModelRunner

from perf.gpu import correctness

ROWS, STEPS = 3, 3


def test_correct_logits_are_within_the_bounds_and_a_step_at_a_wrong_position_is_not(
    fp32: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = correctness.texts(fp32, ROWS, STEPS)
    assert len({len(text) for text in given}) > 1, "equal lengths would need no padding"
    decoded, plain = correctness.through_slots(fp32, given, STEPS), correctness.alone(fp32, given, STEPS)
    assert [found.shape for found in decoded] == [found.shape for found in plain]
    assert decoded[0].shape == (STEPS + 1, fp32.config.vocab_size)
    assert correctness.distance(plain, decoded, "fp32")["passed"]
    decode = ModelRunner.decode

    def one_position_late(
        model: ModelRunner, first: int, tokens: torch.Tensor, positions: torch.Tensor, span: int
    ) -> torch.Tensor:
        return decode(model, first, tokens, positions - 1, span)

    monkeypatch.setattr(ModelRunner, "decode", one_position_late)
    late = correctness.through_slots(fp32, given, STEPS)
    assert not correctness.distance(plain, late, "fp16")["passed"]
    assert not correctness.distance(plain, late, "int8")["passed"]


def test_nan_is_never_within_the_bounds() -> None:
    plain = [torch.randn(2, 5)]
    assert correctness.distance(plain, plain, "int8")["passed"]
    assert not correctness.distance(plain, [torch.full((2, 5), torch.nan)], "int8")["passed"]
