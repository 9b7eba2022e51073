"""From records to a measurement: the steady-state window, throughput, latencies; and the roofline beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from transformers import LlamaConfig

from perf.load.records import Record, Run
from perf.load.summary import summarize
from perf.roofline import DeviceRates, Roofline, Weights, roofline


def unary(scheduled: float, ended: float, tokens: int) -> Record:
    return Record(scheduled, scheduled, ended, (), 100, tokens, "")


def streamed(scheduled: float, sent: float, times: tuple[float, ...], tokens: int) -> Record:
    return Record(scheduled, sent, times[-1], times, 100, tokens, "")


def failed(scheduled: float, error: str, ended: float = 9.0) -> Record:
    return Record(scheduled, scheduled, ended, (), None, 0, error)


def row(scheduled: float, tokens: int) -> Record:
    """Return a stream of one token per second."""
    return streamed(scheduled, scheduled, tuple(scheduled + number + 1 for number in range(tokens)), tokens)


def summary_of(concurrency: int, warmup: int, *records: Record) -> dict[str, Any]:
    return summarize(Run(concurrency, records, warmup))


def test_the_throughput_of_streams_has_neither_warm_up_nor_tail() -> None:
    """Two rows of a token a second: 0-1, 1-5, 5-10 and 0-3, 3-6; from 1 to 6 both are in flight."""
    summary = summary_of(2, 2, row(0.0, 1), row(0.0, 3), row(1.0, 4), row(3.0, 3), row(5.0, 5))
    # At 1 … 5: of the first row 1 and 4, of the second one 3 and 2; what arrives at 6 is the next second's.
    assert (summary["duration_s"], summary["output_tokens"], summary["tokens_per_second"]) == (5.0, 10, 2.0)
    assert summary["requests_per_second"] == 2.0 / 3.2
    # All after the warm-up, those answered after the window too.
    assert (summary["requests"], summary["latency_ms"]["mean"], summary["latency_ms"]["max"]) == (3, 4000.0, 5000.0)


def test_latencies_include_the_time_before_sending() -> None:
    """The generator is 3 s late: the user has waited all the same."""
    summary = summary_of(1, 0, streamed(1.0, 4.0, (4.5, 5.0, 6.5), 3))
    assert summary["latency_ms"]["max"] == 5500.0
    assert summary["time_to_first_token_ms"]["max"] == 3500.0


def test_a_failure_closes_the_window_like_an_answer() -> None:
    summary = summary_of(1, 1, unary(0.0, 1.0, 10), unary(1.0, 3.0, 20), failed(3.0, "HTTP 500", 3.5))
    assert (summary["duration_s"], summary["output_tokens"], summary["errors"]) == (2.5, 30, 1)


def test_failed_requests_of_the_warm_up_are_counted_too() -> None:
    refused = "connection failed: Connection refused"
    counts = {"requests": 2, "errors": 3, "error_messages": {refused: 2, "HTTP 500": 1}}
    records = [failed(0.0, refused), failed(1.0, refused), failed(1.0, "HTTP 500")]
    assert summary_of(1, 1, *records) == counts, "without answers there are counts only"
    with_answer = summary_of(1, 1, *records, unary(0.0, 2.0, 10))
    assert (with_answer["requests"], with_answer["errors"]) == (3, 3)
    assert with_answer["latency_ms"]["max"] == 2000.0


def turn(number: int, scheduled: float, ttft: float, ended: float, cached: int | None = None) -> Record:
    times = (scheduled + ttft, ended)
    return Record(scheduled, scheduled, ended, times, 100, 2, "", cached, turn=number)


def test_the_steady_state_of_chats_ends_with_the_first_chat_after_the_last_began() -> None:
    """One user's chats end at 2 and 6, the other's at 1 and 3 and 5."""
    chats = [
        [turn(1, 0, 0.5, 1), turn(2, 1, 0.5, 2)],
        [turn(1, 0, 0.5, 1)],
        [turn(1, 1, 0.5, 2), turn(2, 2, 0.5, 3)],
        [turn(1, 2, 0.5, 4), turn(2, 4, 0.5, 6)],
        [turn(1, 3, 0.5, 4), turn(2, 4, 0.5, 5)],
    ]
    window = Run(2, tuple(record for chat in chats for record in chat), warmup=3).steady
    assert window == (1, 5)


def test_the_hit_rate_is_of_the_measured_prompts() -> None:
    records = (turn(1, 0, 9, 10, 0), turn(1, 10, 2, 13, 60), turn(2, 13, 1, 15, 90))
    assert summary_of(1, 1, *records)["hit_rate"] == 0.75


def test_the_drafted_share_is_of_the_measured_output() -> None:
    drafted = [Record(0, 0, 1, (1,), 100, 20, accepted_tokens=15, rejected_tokens=5), Record(0, 0, 1, (1,), 100, 20)]
    summary = summary_of(1, 1, turn(1, 0, 9, 10), *drafted)
    assert (summary["accepted_tokens"], summary["rejected_tokens"], summary["drafted_share"]) == (15, 5, 0.375)


# One layer of one head: 4 x 2 x 2 in attention, 3 x 2 x 3 in the MLP, 2 x 5 in the head; a cached position has 2 keys
# and 2 values. In FP32 a pass reads 4 x 34 + 4 x 10 = 176 bytes of weights, and 16 for each cached position.
TINY = LlamaConfig(
    hidden_size=2,
    intermediate_size=3,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    vocab_size=5,
)


def tiny(sequences: int, requests: Sequence[int], prompt: int, bandwidth: float, operations: float) -> Roofline:
    rates = DeviceRates("cpu", 1, {1: bandwidth}, {"fp32": operations})
    return roofline(TINY, "fp32", rates, sequences, requests, prompt)


@pytest.mark.parametrize(
    ("weights", "weight_bytes", "cached_bytes"),
    # INT8 has a scale of four bytes for each of its 2 x 7 + 2 channels and the head's 5, and a cache in BF16.
    [("fp32", 4 * 34 + 4 * 10, 16), ("fp16", 2 * 34 + 2 * 10, 8), ("int8", 34 + 10 + 4 * (16 + 5), 8)],
)
def test_each_format_has_its_bytes_on_a_cpu(weights: Weights, weight_bytes: int, cached_bytes: int) -> None:
    """One request of 2 tokens after 3: a step over 3 positions."""
    bound = roofline(TINY, weights, DeviceRates("cpu", 2, {1: 1.0}, {"fp32": 1e12}), 1, [2], 3)
    assert bound.seconds == weight_bytes + 3 * cached_bytes


def test_a_load_bound_by_bandwidth_takes_the_time_of_its_bytes() -> None:
    """One request of 3 tokens after 2: two steps, over 2 and 3 positions."""
    bound = tiny(sequences=1, requests=[3], prompt=2, bandwidth=100.0, operations=1e9)
    assert bound.seconds == pytest.approx((2 * 176 + (2 + 3) * 16) / 100)
    beside = bound.beside(bound.tokens_per_second / 4)
    assert (beside["fraction"], beside["bound_by"]) == (0.25, "bandwidth")


def test_a_load_bound_by_operations_takes_the_time_of_its_operations() -> None:
    """Two requests of 2 tokens after 2: 4 prompt tokens and 2 decoded ones, 4 times the head, attention over 2 x 3
    positions of the prompts and 2 x 3 of the steps.
    """
    bound = tiny(sequences=2, requests=[2, 2], prompt=2, bandwidth=1e9, operations=10.0)
    assert bound.seconds == pytest.approx((2 * 34 * 6 + 2 * 10 * 4 + 8 * (6 + 6)) / 10)
    assert bound.bound_by == "operations"


@pytest.mark.parametrize(
    ("sequences", "requests", "passes", "positions"),
    [
        (8, [4] * 8, 3, 8 * (2 + 3 + 4)),
        # While one request is long, others follow at the other sequences' places.
        (8, [2] * 7 + [100], 14, 7 * 2 + sum(range(2, 101))),
        # More requests than sequences wait for a pass of their own.
        (2, [3] * 4, 4, 4 * (2 + 3)),
        # The only token is the prefill's.
        (2, [1, 1], 0, 0),
    ],
)
def test_passes_follow_from_the_requests_lengths(
    sequences: int, requests: list[int], passes: int, positions: int
) -> None:
    bound = tiny(sequences, requests, 2, bandwidth=1.0, operations=1e9)
    # With nothing to read, operations are the bound.
    assert bound.seconds == pytest.approx(passes * 176 + positions * 16, abs=1e-3)
