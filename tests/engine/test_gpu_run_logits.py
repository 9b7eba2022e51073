"""The comparison of logits accepts correct ones and detects a mistake in the slots."""

from __future__ import annotations

import pytest
import torch
from llama_engine.model.loader import Checkpoint
from llama_engine.model.model_runner import ModelRunner

from perf.gpu import logits
from perf.gpu.logits import AGAINST_FP32, SAME_WEIGHTS, Bounds

ROWS, STEPS = 3, 3


def test_correct_logits_are_within_the_bounds_and_a_step_at_a_wrong_position_is_not(
    fp32: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = logits.texts(fp32, ROWS, STEPS)
    assert len({len(text) for text in given}) > 1, "equal lengths would need no padding"
    decoded, plain = logits.through_slots(fp32, given, STEPS), logits.alone(fp32, given, STEPS)
    assert [found.shape for found in decoded] == [found.shape for found in plain]
    assert decoded[0].shape == (STEPS + 1, fp32.config.vocab_size)
    assert logits.distance(plain, decoded).within(SAME_WEIGHTS["fp32"])
    decode = ModelRunner.decode

    def one_position_late(
        model: ModelRunner, first: int, tokens: torch.Tensor, positions: torch.Tensor, span: int
    ) -> torch.Tensor:
        return decode(model, first, tokens, positions - 1, span)

    monkeypatch.setattr(ModelRunner, "decode", one_position_late)
    found = logits.distance(plain, logits.through_slots(fp32, given, STEPS))
    for weights in ("fp16", "int8"):
        assert not found.within(SAME_WEIGHTS[weights])
        assert not found.within(AGAINST_FP32[weights])


def test_nan_is_never_within_the_bounds() -> None:
    assert not logits.Distance(float("nan"), 0.0, 0.0, 0.0).within(Bounds(1.0, 1.0))
    assert not logits.Distance(0.0, 0.0, float("nan"), 0.0).within(Bounds(1.0, 1.0))
