"""The choice of a GPU's attention: it is used only if it agrees with its reference, whatever is beside a sequence."""

from __future__ import annotations

import logging

import pytest
import torch
from engine.engines import attention_by_sequence
from llama_engine.kernels.gpu import gpu_reference, varlen_attention
from llama_engine.kernels.gpu.varlen_attention import Layout, VarlenAttention, choose_attention
from torch.nn import functional

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


@pytest.mark.parametrize(
    ("attention", "capability", "reason"),
    [
        (attention_by_sequence, (8, 0), None),
        (attention_by_sequence, (7, 5), "this GPU is older than Ampere"),
        (_raising, (9, 0), "FlashAttention only supports head dims up to 256"),
        (_nan, (9, 0), "its result is wrong by nan% of the largest value"),
        (_not_causal, (9, 0), "its result is wrong by "),
        (_dependent_on_neighbours, (9, 0), "on this GPU a sequence's result depends on its neighbours"),
    ],
)
def test_only_a_verified_attention_is_used(
    attention: VarlenAttention, capability: tuple[int, int], reason: str | None, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(varlen_attention, "varlen_attention", attention)
    chosen = choose_attention(CPU, torch.float16, 16, 2)
    assert chosen is (attention if reason is None else None)
    lines = [f"FlashAttention can't be used; attention takes masks: RuntimeError: {reason}"] if reason else []
    assert len(caplog.messages) == len(lines)
    assert all(message.startswith(line) for message, line in zip(caplog.messages, lines, strict=True))


def _without_window(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, scaling: float, window: int | None
) -> torch.Tensor:
    return attention_by_sequence(query, keys, values, layout, scaling, None)


@pytest.mark.parametrize(("attention", "windowed"), [(attention_by_sequence, True), (_without_window, False)])
def test_the_window_is_verified_for_models_that_have_one(
    attention: VarlenAttention, windowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(varlen_attention, "varlen_attention", attention)
    assert choose_attention(CPU, torch.float16, 16, 2) is attention
    assert (choose_attention(CPU, torch.float16, 16, 2, windowed=True) is attention) == windowed


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("count", "length"), [(1, 1), (1, 20), (7, 20), (20, 20)])
def test_the_reference_is_causal_attention_over_the_sequence(count: int, length: int, group: int) -> None:
    random = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 30, 2, 16, generator=random)
    keys[length:], values[length:] = torch.nan, torch.nan
    query = torch.randn(count, 2 * group, 16, generator=random)
    mask = torch.ones(length, length, dtype=torch.bool).tril()[length - count :]
    expected = functional.scaled_dot_product_attention(
        query.transpose(0, 1), keys[:length].transpose(0, 1).repeat_interleave(group, 0),
        values[:length].transpose(0, 1).repeat_interleave(group, 0), attn_mask=mask, scale=0.25,
    )  # fmt: skip
    attended = gpu_reference.attention(query, keys, values, length, 0.25)
    torch.testing.assert_close(attended, expected.transpose(0, 1))
