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


def _nan(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query * torch.nan


def _not_causal(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, scaling: float, window: int | None
) -> torch.Tensor:
    return attention_by_sequence(query, keys, values, layout._replace(lengths=layout.lengths + 1), scaling, window)


def _dependent_on_neighbours(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, scaling: float, window: int | None
) -> torch.Tensor:
    """Within the tolerance, but larger beside others."""
    return attention_by_sequence(query, keys, values, layout, scaling, window) * (1 + len(layout.lengths) / 512)


def _without_window(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, scaling: float, window: int | None
) -> torch.Tensor:
    return attention_by_sequence(query, keys, values, layout, scaling, None)


@pytest.mark.parametrize(
    ("attention", "capability", "windowed", "reason"),
    [
        (attention_by_sequence, (8, 0), True, None),
        (attention_by_sequence, (7, 5), False, "this GPU is older than Ampere"),
        (_raising, (9, 0), False, "FlashAttention only supports head dims up to 256"),
        (_nan, (9, 0), False, "its result is wrong by nan% of the largest value"),
        (_not_causal, (9, 0), False, "its result is wrong by "),
        (_dependent_on_neighbours, (9, 0), False, "on this GPU a sequence's result depends on its neighbours"),
        (_without_window, (8, 0), False, None),
        (_without_window, (8, 0), True, "its result is wrong by "),
    ],
)
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
