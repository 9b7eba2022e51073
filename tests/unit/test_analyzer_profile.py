"""A profile export as perf_analyzer 2.51 writes it, and what in one must never become a measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf.analyzer import profile
from perf.analyzer.errors import FailedRunError
from perf.load.protocols import Request

SECOND = 1_000_000_000
BEGAN = 1_795_245_759 * SECOND


def exported(prompt: str, asked: int, sent_s: float, answered_s: float, came: int | None = None) -> dict[str, object]:
    """One request of an export; came: tokens, None for as many as were asked for."""
    return {
        "timestamp": BEGAN + int(sent_s * SECOND),
        "request_inputs": {"top_k": 0, "text_input": prompt, "seed": 0, "max_tokens": asked, "min_tokens": asked},
        "response_timestamps": [BEGAN + int(answered_s * SECOND)],
        "response_outputs": [
            {
                "text_output": "x",
                "num_output_tokens": asked if came is None else came,
                "num_input_tokens": 20,
                "finish_reason": "length",
            }
        ],
    }


def written(folder: Path, requests: list[dict[str, object]]) -> Path:
    path = folder / "profile.json"
    experiment = {"experiment": {"mode": "concurrency", "value": 2}, "requests": requests, "window_boundaries": []}
    path.write_text(json.dumps({"experiments": [experiment], "version": "2.51.0", "service_kind": "triton"}))
    return path


def test_requests_are_read_in_the_order_in_which_they_were_sent(tmp_path: Path) -> None:
    path = written(tmp_path, [exported("b", 6, 0.25, 1.0), exported("a", 5, 0.0, 0.5)])
    first, second = profile.read(path)
    assert (first.prompt, first.asked_tokens, first.output_tokens, first.prompt_tokens) == ("a", 5, 5, 20)
    assert (second.prompt, second.asked_tokens) == ("b", 6)
    # Times are kept to less than a microsecond.
    assert (first.latency, second.latency) == pytest.approx((0.5, 0.75), abs=1e-6)


def test_exactly_what_was_asked_for_passes(tmp_path: Path) -> None:
    answered = profile.read(written(tmp_path, [exported("a", 5, 0, 1), exported("a", 5, 0, 1), exported("b", 6, 1, 2)]))
    profile.check(answered, [Request("b", 6), Request("a", 5), Request("a", 5)])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([Request("a", 5)], "to send 1 requests and sent 2: 0 are missing, 1 are others"),
        ([Request("a", 5), Request("b", 6), Request("c", 7)], "to send 3 requests and sent 2: 1 are missing"),
        # The same entry twice instead of each once: other lengths were measured than are reported.
        ([Request("a", 5), Request("c", 6)], "1 are missing, 1 are others"),
    ],
)
def test_a_run_that_sent_something_else_is_no_measurement(tmp_path: Path, asked: list[Request], said: str) -> None:
    answered = profile.read(written(tmp_path, [exported("a", 5, 0, 1), exported("b", 6, 0, 1)]))
    with pytest.raises(FailedRunError, match=said):
        profile.check(answered, asked)


def test_an_answer_that_ended_early_is_no_measurement(tmp_path: Path) -> None:
    answered = profile.read(written(tmp_path, [exported("a", 5, 0, 1, came=3), exported("b", 6, 0, 1)]))
    with pytest.raises(FailedRunError, match=r"1 of 2 answers have another length .* 3 tokens instead of 5"):
        profile.check(answered, [Request("a", 5), Request("b", 6)])


def test_a_failed_request_in_an_export_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FailedRunError, match="a request failed"):
        profile.read(written(tmp_path, [{**exported("a", 5, 0, 1), "success": False}]))


@pytest.mark.parametrize("content", ["", "{}", '{"experiments": []}', '{"experiments": [{"requests": [{}]}]}'])
def test_a_file_that_is_no_export_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(FailedRunError, match=r"profile\.json can't be read"):
        profile.read(path)
