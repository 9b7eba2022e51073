"""The stand-in for a CUDA graph: what it can tell of a computation that isn't fit for one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine.recorded_graphs import Recording


def test_a_value_of_python_is_read_anew_or_a_tensor_is_not() -> None:
    static, result, factor = torch.ones(3), torch.zeros(3), 2.0
    with Recording() as recording:
        result[1:] = (static * factor)[1:]
    factor = 10.0
    static.fill_(7.0)
    recording.replay()
    assert result.tolist() == [0.0, 14.0, 14.0]


def test_what_adds_up_does_not_add_up_when_replayed() -> None:
    static, total = torch.ones(2, 2), torch.zeros(4)
    with Recording() as recording:
        total += static.t().reshape(4)
    for _ in range(3):
        recording.replay()
    assert total.tolist() == [4.0] * 4


@pytest.mark.parametrize("look", [float, bool, torch.Tensor.item, torch.nonzero])
def test_looking_at_a_value_can_be_recorded(look: Callable[[torch.Tensor], object]) -> None:
    with Recording(), pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        look(torch.ones(1).sum())


def test_values_of_the_host_can_be_recorded() -> None:
    static = torch.zeros(2)
    with Recording() as recording:
        static[0] = 3.0
    static.zero_()
    recording.replay()
    assert static.tolist() == [3.0, 0.0]
    with Recording(), pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        static += torch.tensor([1.0, 2.0])
