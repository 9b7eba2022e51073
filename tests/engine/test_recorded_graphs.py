"""The stand-in for CUDA graphs: what it replays, and what it refuses to capture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine.recorded_graphs import Recording

REFUSED = "not permitted when stream is capturing"


def test_a_replay_reads_tensors_anew_and_python_values_as_captured() -> None:
    static, result, factor = torch.ones(3), torch.zeros(3), 2.0
    with Recording() as recording:
        result[1:] = (static * factor)[1:]
    factor = 10.0
    static.fill_(7.0)
    recording.replay()
    assert result.tolist() == [0.0, 14.0, 14.0]


def test_sums_add_up_over_replays() -> None:
    static, total = torch.ones(2, 2), torch.zeros(4)
    with Recording() as recording:
        total += static.t().reshape(4)
    for _ in range(3):
        recording.replay()
    assert total.tolist() == [4.0] * 4


@pytest.mark.parametrize("look", [float, bool, torch.Tensor.item, torch.nonzero])
def test_operations_that_look_at_a_value_cannot_be_captured(look: Callable[[torch.Tensor], object]) -> None:
    with Recording(), pytest.raises(RuntimeError, match=REFUSED):
        look(torch.ones(1).sum())


def test_a_value_from_the_host_can_be_captured_and_a_tensor_cannot() -> None:
    static = torch.zeros(2)
    with Recording() as recording:
        static[0] = 3.0
    static.zero_()
    recording.replay()
    assert static.tolist() == [3.0, 0.0]
    with Recording(), pytest.raises(RuntimeError, match=REFUSED):
        static += torch.tensor([1.0, 2.0])
