"""The choice of a GPU's attention: it is used only if it agrees with its reference, whatever is beside a sequence."""

from __future__ import annotations

import logging

import pytest
import torch
from engine.engines import attention_by_sequence
from llama_engine.kernels.gpu import varlen_attention
from llama_engine.kernels.gpu.varlen_attention import Layout, VarlenAttention, choose_attention

CPU = torch.device("cpu")


def _raising(*_: object) -> torch.Tensor:
    raise RuntimeError("FlashAttention only supports head dims up to 256\nat line 7")


def _longer(layout: Layout) -> Layout:
    return layout._replace(lengths=layout.lengths + 1)


WRONG = "its result is wrong by "


@pytest.mark.parametrize(
    ("attention", "capability", "windowed", "reason"),
    [
        (attention_by_sequence, (8, 0), True, None),
        (attention_by_sequence, (7, 5), False, "this GPU is older than Ampere"),
        (_raising, (9, 0), False, "FlashAttention only supports head dims up to 256"),
        (lambda query, *_: query * torch.nan, (9, 0), False, f"{WRONG}nan% of the largest value"),
        # Not causal.
        (lambda q, k, v, layout, *rest: attention_by_sequence(q, k, v, _longer(layout), *rest), (9, 0), False, WRONG),
        # Within the tolerance, but larger beside others.
        (lambda *arguments: attention_by_sequence(*arguments) * (1 + len(arguments[3].lengths) / 512), (9, 0), False,
         "on this GPU a sequence's result depends on its neighbours"),
        # Without a window.
        (lambda q, k, v, layout, scale, _: attention_by_sequence(q, k, v, layout, scale, None), (8, 0), False, None),
        (lambda q, k, v, layout, scale, _: attention_by_sequence(q, k, v, layout, scale, None), (8, 0), True, WRONG),
    ],
)  # fmt: skip
def test_only_a_verified_attention_is_used(
    attention: VarlenAttention, capability: tuple[int, int], windowed: bool, reason: str | None,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(varlen_attention, "varlen_attention", attention)
    chosen = choose_attention(CPU, torch.float16, 16, 2, windowed)
    assert chosen is (attention if reason is None else None)
    lines = [f"FlashAttention can't be used; attention takes masks: RuntimeError: {reason}"] if reason else []
    assert len(caplog.messages) == len(lines)
    assert all(message.startswith(line) for message, line in zip(caplog.messages, lines, strict=True))
