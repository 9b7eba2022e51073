"""What the OpenAI endpoint costs, from the rounds of a run."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from perf.openai_overhead import measure, verdict


@pytest.mark.parametrize(
    ("rate", "ttft", "within"),
    [(950.0, 0.060, True), (949.0, 0.050, False), (1000.0, 0.0601, False)],
)
def test_the_bounds_are_on_the_medians_of_throughput_and_ttft(rate: float, ttft: float, within: bool) -> None:
    grpc = [(one, 0.050) for one in (900.0, 1000.0, 1100.0)]
    found = verdict({"grpc": grpc, "openai": [(rate + step, ttft) for step in (-50.0, 0.0, 50.0)]})
    assert found["within_bounds"] is within
    assert found["loss"] == pytest.approx(1 - rate / 1000)
    assert found["tokens_per_second"] == {"grpc": 1000.0, "openai": rate}


async def test_a_round_counts_every_token_of_the_requests_that_it_began() -> None:
    begun = 0

    async def stream() -> AsyncIterator[int]:
        nonlocal begun
        begun += 1
        yield 1
        yield 4

    rate, ttft = await measure(stream, 3, 0.05)
    assert begun >= 3
    assert rate > 0
    assert 0 <= ttft < 1
