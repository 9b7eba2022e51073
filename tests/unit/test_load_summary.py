"""The arithmetic between records and a measurement."""

from __future__ import annotations

import pytest

from perf.load.arrivals import Closed, Poisson
from perf.load.records import Record
from perf.load.run import Run
from perf.load.summary import SLO, summarize
from perf.setting.window import Window


def unary(scheduled: float, ended: float, tokens: int) -> Record:
    return Record(scheduled, scheduled, None, ended, ended, (), 100, tokens, "")


def streamed(scheduled: float, sent: float, times: tuple[float, ...], tokens: int) -> Record:
    return Record(scheduled, sent, times[0], times[-1], times[-1], times, 100, tokens, "")


def failed(scheduled: float, error: str, ended: float = 9.0) -> Record:
    return Record(scheduled, scheduled, None, None, ended, (), None, 0, error)


def row(scheduled: float, tokens: int) -> Record:
    """Return a stream of a token a second."""
    return streamed(scheduled, scheduled, tuple(scheduled + number + 1 for number in range(tokens)), tokens)


def open_loop(*records: Record) -> Run:
    return Run(Poisson(1.0, 0), records, 0)


def closed_loop(concurrency: int, warmup: int, *records: Record) -> Run:
    return Run(Closed(concurrency), records, warmup)


def test_an_open_loop_s_window_is_another_one_than_first_arrival_to_last_answer() -> None:
    summary = summarize(open_loop(unary(2.0, 4.0, 30), unary(3.0, 7.0, 20), unary(3.0, 6.0, 50)), None)
    assert summary["duration_s"] == 5.0
    assert (summary["output_tokens"], summary["tokens_per_second"]) == (100, 20.0)
    assert summary["requests_per_second"] == 0.6
    assert summary["mean_in_flight"] == (2 + 4 + 3) / 5
    assert summary["latency_ms"] == {"mean": 3000.0, "p50": 3000.0, "p95": 4000.0, "p99": 4000.0, "max": 4000.0}
    assert summary["latencies_s"] == [2.0, 4.0, 3.0]
    assert "time_to_first_token_ms" not in summary, "a unary answer has no first token"


def test_a_tail_or_a_beginning_is_in_the_throughput_of_streams() -> None:
    """Two rows of a token a second: 0-1, 1-5, 5-10 and 0-3, 3-6; from 1 to 6 both are at work."""
    run = closed_loop(2, 2, row(0.0, 1), row(0.0, 3), row(1.0, 4), row(3.0, 3), row(5.0, 5))
    summary = summarize(run, None)
    # At 1 … 5: of the first row 1 and 4, of the second one 3 and 2; what comes at 6 is the next second's.
    assert (summary["duration_s"], summary["output_tokens"], summary["tokens_per_second"]) == (5.0, 10, 2.0)
    assert summary["requests_per_second"] == 2.0 / 3.2
    assert summary["mean_in_flight"] == 2.0
    assert summary["whole_run"] == {
        "requests": 5,
        "duration_s": 10.0,
        "output_tokens": 16,
        "requests_per_second": 0.5,
        "tokens_per_second": 1.6,
    }
    # All after the warm-up, those answered after the window too.
    assert (summary["requests"], summary["latencies_s"]) == (3, [4.0, 3.0, 5.0])


def test_a_tail_or_a_beginning_is_in_the_throughput_of_a_server_with_one_at_a_time() -> None:
    """A second for each: answers at 1 … 8, the k-th of 10 k tokens; the last request is sent at 6."""
    records = [unary(max(0.0, number - 1.0), number + 1.0, 10 * (number + 1)) for number in range(8)]
    summary = summarize(closed_loop(2, 2, *records), SLO(2.0, 0.0))
    # The answers at 1 … 6.
    assert (summary["duration_s"], summary["output_tokens"], summary["tokens_per_second"]) == (6.0, 210, 35.0)
    assert summary["requests_per_second"] == round(35 / 45, 4)
    assert summary["goodput"]["requests_per_second"] == round(35 / 45, 4)  # type: ignore[index]
    assert summary["whole_run"]["tokens_per_second"] == 45.0  # type: ignore[index]


@pytest.mark.parametrize("rounds", [1, 2, 10])
def test_a_longer_run_makes_a_server_faster(rounds: int) -> None:
    # Four rows of a token a second, never two answers at a time.
    free, records = [0.0, 0.25, 0.5, 0.75], []
    for number in range(4 + 4 * rounds):
        scheduled = min(free)
        records.append(row(scheduled, 3 + 7 * number % 11))
        free[free.index(scheduled)] = records[-1].ended
    summary = summarize(closed_loop(4, 4, *records), None)
    assert summary["tokens_per_second"] == pytest.approx(4.0, abs=4 / summary["duration_s"])  # type: ignore[operator]
    assert summary["mean_in_flight"] == 4.0


def test_a_single_wave_has_a_window_without_answers() -> None:
    summary = summarize(closed_loop(4, 0, unary(0.0, 1.0, 10), unary(0.0, 4.0, 30)), None)
    assert (summary["duration_s"], summary["output_tokens"], summary["requests_per_second"]) == (4.0, 40, 0.5)


def test_an_event_of_several_tokens_is_counted_as_one() -> None:
    record = streamed(0.0, 0.0, (1.0, 2.0, 5.0), 9)
    assert record.tokens_in(Window(1.0, 5.0)) == 6.0
    assert record.tokens_in(Window(2.5, 5.5)) == 3.0


def test_a_request_that_failed_last_leaves_the_window_open() -> None:
    summary = summarize(closed_loop(1, 1, unary(0.0, 1.0, 10), unary(1.0, 3.0, 20), failed(3.0, "HTTP 500", 3.5)), None)
    assert (summary["duration_s"], summary["output_tokens"], summary["errors"]) == (2.5, 30, 1)


def test_what_the_warm_up_lost_is_not_told() -> None:
    late = "no whole answer when the run's time was over, 9.0 s after it was sent"
    summary = summarize(closed_loop(1, 1, failed(0.0, late), failed(1.0, "HTTP 500")), None)
    assert (summary["requests"], summary["errors"], summary["unanswered"]) == (1, 2, 1)


def test_waiting_to_be_sent_is_left_out_of_the_latency() -> None:
    """The generator fell behind by 3 s: the user waited all the same."""
    summary = summarize(open_loop(streamed(1.0, 4.0, (4.5, 5.0, 6.5), 3)), None)
    assert summary["latency_ms"]["max"] == 5500.0  # type: ignore[index]
    assert summary["time_to_first_token_ms"]["max"] == 3500.0  # type: ignore[index]


def test_tokens_that_came_joined_are_counted_as_one() -> None:
    summary = summarize(open_loop(streamed(0.0, 0.0, (1.0, 2.0, 5.0), 9)), None)
    assert summary["inter_token_latency_ms"]["mean"] == 500.0  # type: ignore[index]
    assert summary["gap_between_events_ms"]["max"] == 3000.0  # type: ignore[index]


def test_a_single_token_has_a_latency_between_tokens() -> None:
    assert "inter_token_latency_ms" not in summarize(open_loop(streamed(0.0, 0.0, (1.0,), 1)), None)


def test_failed_requests_are_lost_or_counted_as_served() -> None:
    refused = "connection failed: Connection refused"
    summary = summarize(
        open_loop(unary(0.0, 2.0, 10), failed(0.0, refused), failed(1.0, refused), failed(1.0, "HTTP 500")), None
    )
    assert (summary["requests"], summary["errors"]) == (4, 3)
    assert summary["error_messages"] == {refused: 2, "HTTP 500": 1}
    assert (summary["output_tokens"], summary["requests_per_second"]) == (10, 0.5)
    assert len(summary["latencies_s"]) == 1  # type: ignore[arg-type]


def test_a_run_in_which_all_failed_has_figures() -> None:
    assert summarize(open_loop(failed(0.0, "HTTP 500")), SLO(1.0, 1.0)) == {
        "requests": 1,
        "errors": 1,
        "error_messages": {"HTTP 500": 1},
        "unanswered": 0,
    }


def test_no_records_are_summarized() -> None:
    with pytest.raises(ValueError, match="no records"):
        summarize(open_loop(), None)


def test_goodput_counts_who_missed_the_slo() -> None:
    records = [
        streamed(0.0, 0.0, (1.0, 1.2), 3),  # meets both, just
        streamed(0.0, 0.0, (1.1, 1.2), 3),  # first token late
        streamed(0.0, 0.0, (0.9, 1.2), 3),  # tokens slow
        streamed(0.0, 0.0, (0.9,), 1),  # a single token is never slow
        failed(0.0, "HTTP 500"),
    ]
    summary = summarize(open_loop(*records), SLO(1.0, 0.1001))
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
