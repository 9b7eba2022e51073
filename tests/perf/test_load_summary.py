"""From records to a measurement: the steady-state window, throughput, latencies."""

from __future__ import annotations

from typing import Any

from perf.load.records import Record, Run
from perf.load.summary import summarize


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
