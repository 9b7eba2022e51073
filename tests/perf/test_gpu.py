"""`make bench-gpu`: its reference is transformers' generate(), its requests have the length it reports."""

from __future__ import annotations

import torch

from perf.gpu import exactness


def test_greedy_fp32_tokens_are_generates() -> None:
    assert exactness(torch.device("cpu"), amount=2, tokens=12) == {"requests": 2, "tokens": 24, "different": 0}
