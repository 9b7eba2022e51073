"""The arithmetic between records and a measurement."""

from __future__ import annotations

import pytest
from load.records import Record
from load.summary import SLO, summarize


def unary(scheduled: float, ended: float, tokens: int) -> Record:
    return Record(scheduled, scheduled, None, ended, (), 100, tokens, "")


def streamed(scheduled: float, sent: float, times: tuple[float, ...], tokens: int) -> Record:
    return Record(scheduled, sent, times[0], times[-1], times, 100, tokens, "")


def failed(scheduled: float, error: str) -> Record:
    return Record(scheduled, scheduled, None, None, (), None, 0, error)


def test_the_window_is_another_one_than_first_send_to_last_answer() -> None:
    summary = summarize([unary(2.0, 4.0, 30), unary(3.0, 7.0, 20), unary(3.0, 6.0, 50)], None)
    assert summary["duration_s"] == 5.0
    assert (summary["output_tokens"], summary["tokens_per_second"]) == (100, 20.0)
    assert summary["requests_per_second"] == 0.6
    assert summary["mean_in_flight"] == (2 + 4 + 3) / 5
    assert summary["latency_ms"] == {"mean": 3000.0, "p50": 3000.0, "p95": 4000.0, "p99": 4000.0, "max": 4000.0}
    assert summary["latencies_s"] == [2.0, 4.0, 3.0]
    assert "time_to_first_token_ms" not in summary, "a unary answer has no first token"


def test_waiting_to_be_sent_is_left_out_of_the_latency() -> None:
    """The generator fell behind by 3 s: the user waited all the same."""
    summary = summarize([streamed(1.0, 4.0, (4.5, 5.0, 6.5), 3)], None)
    assert summary["latency_ms"]["max"] == 5500.0  # type: ignore[index]
    assert summary["time_to_first_token_ms"]["max"] == 3500.0  # type: ignore[index]


def test_tokens_that_came_joined_are_counted_as_one() -> None:
    summary = summarize([streamed(0.0, 0.0, (1.0, 2.0, 5.0), 9)], None)
    assert summary["inter_token_latency_ms"]["mean"] == 500.0  # type: ignore[index]
    assert summary["gap_between_events_ms"]["max"] == 3000.0  # type: ignore[index]


def test_a_single_token_has_a_latency_between_tokens() -> None:
    assert "inter_token_latency_ms" not in summarize([streamed(0.0, 0.0, (1.0,), 1)], None)


def test_failed_requests_are_lost_or_counted_as_served() -> None:
    refused = "connection failed: Connection refused"
    summary = summarize(
        [unary(0.0, 2.0, 10), failed(0.0, refused), failed(1.0, refused), failed(1.0, "HTTP 500")], None
    )
    assert (summary["requests"], summary["errors"]) == (4, 3)
    assert summary["error_messages"] == {refused: 2, "HTTP 500": 1}
    assert (summary["output_tokens"], summary["requests_per_second"]) == (10, 0.5)
    assert len(summary["latencies_s"]) == 1  # type: ignore[arg-type]


def test_a_run_in_which_all_failed_has_figures() -> None:
    assert summarize([failed(0.0, "HTTP 500")], SLO(1.0, 1.0)) == {
        "requests": 1,
        "errors": 1,
        "error_messages": {"HTTP 500": 1},
    }


def test_no_records_are_summarized() -> None:
    with pytest.raises(ValueError, match="no records"):
        summarize([], None)


def test_goodput_counts_who_missed_the_slo() -> None:
    records = [
        streamed(0.0, 0.0, (1.0, 1.2), 3),  # meets both, just
        streamed(0.0, 0.0, (1.1, 1.2), 3),  # first token late
        streamed(0.0, 0.0, (0.9, 1.2), 3),  # tokens slow
        streamed(0.0, 0.0, (0.9,), 1),  # a single token is never slow
        failed(0.0, "HTTP 500"),
    ]
    summary = summarize(records, SLO(1.0, 0.1001))
    assert summary["goodput"] == {
        "slo": {"time_to_first_token_s": 1.0, "inter_token_latency_s": 0.1001},
        "requests_per_second": round(2 / 1.2, 4),
        "share": 0.4,
    }


def test_a_unary_answer_is_held_to_another_bound_than_a_stream_that_meets_the_slo() -> None:
    slo = SLO(1.0, 0.5)
    assert slo.met(unary(2.0, 4.0, 3))
    assert not slo.met(unary(2.0, 4.01, 3))


def test_a_record_changes_on_its_way_from_the_generator() -> None:
    record = streamed(0.5, 0.6, (1.0, 2.0), 3)
    assert Record.from_json(record.to_json() | {"token_times": [1.0, 2.0]}) == record
