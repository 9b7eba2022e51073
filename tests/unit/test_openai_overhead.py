"""What the OpenAI endpoint costs, from the rounds of a run."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from perf.openai_overhead import Round, measure, verdict


def _rounds(openai_rate: float, openai_ttft: float) -> list[Round]:
    grpc = [Round("grpc", rate, 0.050) for rate in (900.0, 1000.0, 1100.0)]
    return [*grpc, *(Round("openai", openai_rate + step, openai_ttft) for step in (-50.0, 0.0, 50.0))]


@pytest.mark.parametrize(
    ("rate", "ttft", "within"),
    [(950.0, 0.060, True), (949.0, 0.050, False), (1000.0, 0.0601, False), (1100.0, 0.04, True)],
)
def test_the_bounds_are_on_the_medians_of_throughput_and_ttft(rate: float, ttft: float, within: bool) -> None:
    found = verdict(_rounds(rate, ttft), 32)
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

    found = await measure("grpc", stream, 3, 0.05)
    assert begun >= 3
    assert found.tokens_per_second > 0
    assert 0 <= found.ttft < 1
