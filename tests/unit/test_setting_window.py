"""The window of full load, for servers whose behaviour can be worked out by hand."""

from __future__ import annotations

import heapq

import pytest

from perf.setting.window import full_load


def one_at_a_time(requests: int, concurrency: int) -> tuple[list[float], list[float]]:
    """Return when each request is sent and answered by a server that takes a second for each, in their order."""
    answered = [float(number + 1) for number in range(requests)]
    return [0.0] * concurrency + answered[: requests - concurrency], answered


def in_batches(requests: int, size: int) -> tuple[list[float], list[float]]:
    """Do the same for a server that takes a second for a batch; so many are sent at a time as fit into two."""
    answered = [float(number // size + 1) for number in range(requests)]
    return [0.0] * 2 * size + answered[: requests - 2 * size], answered


def all_at_once(lengths: list[float], concurrency: int) -> tuple[list[float], list[float]]:
    """Do the same for a server that takes every request at once, and its own time for each."""
    sent, answered, underway = [], [], [0.0] * concurrency
    for length in lengths:
        now = heapq.heappop(underway)
        sent.append(now)
        answered.append(now + length)
        heapq.heappush(underway, now + length)
    return sent, answered


def test_the_window_begins_at_an_answer_and_ends_when_the_load_falls() -> None:
    window = full_load(*one_at_a_time(12, 4), warmup=4)
    # Answers at 1 … 12; the 12th request is sent at 8, and at 9 nothing follows.
    assert (window.begin, window.end) == (1.0, 9.0)
    assert window.seconds == 8.0


def test_a_server_with_batches_gets_neither_a_batch_too_many_nor_one_too_few() -> None:
    sent, answered = in_batches(64, 8)
    window = full_load(sent, answered, warmup=16)
    inside = sum(window.begin <= moment < window.end for moment in answered)
    assert inside / window.seconds == 8.0


@pytest.mark.parametrize("concurrency", [1, 4, 32])
def test_the_concurrency_holds_all_the_time(concurrency: int) -> None:
    # No two answers at one moment, which would be one answer or two.
    lengths = [1.0 + (7 * number) % 19 + number / 1000 for number in range(3 * concurrency)]
    sent, answered = all_at_once(lengths, concurrency)
    window = full_load(sent, answered, warmup=concurrency)
    edges = sorted({moment for moment in (*sent, *answered) if window.begin <= moment < window.end})
    for moment in edges:
        underway = sum(begin <= moment < end for begin, end in zip(sent, answered, strict=True))
        assert underway == concurrency, f"at {moment} {underway} are underway"
    # Afterwards it falls.
    assert sum(begin <= window.end < end for begin, end in zip(sent, answered, strict=True)) < concurrency


def test_the_order_of_the_requests_doesn_t_matter() -> None:
    sent, answered = one_at_a_time(12, 4)
    assert full_load(sent[::-1], answered[::-1], 4) == full_load(sent, answered, 4)


@pytest.mark.parametrize("warmup", [-1, 4, 5])
def test_a_warm_up_of_everything_is_refused(warmup: int) -> None:
    with pytest.raises(ValueError, match=f"warmup is {warmup}, must be 0 … 3"):
        full_load([0.0] * 4, [1.0] * 4, warmup)
