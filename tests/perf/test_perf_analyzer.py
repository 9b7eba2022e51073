"""perf_analyzer's profile export: only exactly the requested load is a measurement."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import perf_analyzer
from perf.load.protocols import Request
from perf.perf_analyzer import AnalyzerError, measure, read_profile

SECOND = 1_000_000_000
BEGAN = 1_795_245_759 * SECOND
A, B = Request("a", 5), Request("b", 6)


def exported(request: Request, sent_s: float, ended_s: float, tokens: int | None = None) -> dict[str, object]:
    """One request of an export as perf_analyzer 2.51 writes it; tokens: None for as many as requested."""
    length = request.output_tokens
    outputs = {"text_output": "x", "num_output_tokens": length if tokens is None else tokens, "num_input_tokens": 20}
    return {
        "timestamp": BEGAN + int(sent_s * SECOND),
        "request_inputs": {"top_k": 0, "text_input": request.prompt, "max_tokens": length, "min_tokens": length},
        "response_timestamps": [BEGAN + int(ended_s * SECOND)],
        "response_outputs": [{**outputs, "finish_reason": "length"}],
    }


def profile(*requests: dict[str, object]) -> dict[str, object]:
    experiment = {"experiment": {"mode": "concurrency", "value": 2}, "requests": requests, "window_boundaries": []}
    return {"experiments": [experiment], "version": "2.51.0", "service_kind": "triton"}


def test_requests_are_read_in_the_order_of_sending() -> None:
    export = profile(exported(B, 0.25, 1.0), exported(A, 0.0, 0.5), exported(A, 1.0, 2.0))
    first, second, _ = read_profile(export, [A, B, A])
    assert (first.output_tokens, first.prompt_tokens, second.output_tokens) == (5, 20, 6)
    # Times are exact to less than a microsecond.
    assert (first.latency, second.latency) == pytest.approx((0.5, 0.75), abs=1e-6)


def test_an_empty_export_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "perf_analyzer"
    program.write_text("#!/bin/sh\ntest ! -e profile.json && touch profile.json\n")
    program.chmod(0o755)
    monkeypatch.setattr(perf_analyzer, "BINARY", program)
    with pytest.raises(AnalyzerError, match="export is no JSON"):
        measure("127.0.0.1:1", [A], 1, 0, 30.0)


@pytest.mark.parametrize(
    ("planned", "other", "message"),
    [
        ([A], {}, "to send 1 requests and sent 2: 0 are missing, 1 are others"),
        # One entry twice instead of each once: other lengths are measured than reported.
        ([A, Request("c", 6)], {}, "1 are missing, 1 are others"),
        ([A, B], exported(B, 0, 1, tokens=3), "another length than requested: 3 tokens, not 6"),
        ([A, B], {"success": False}, "a request failed"),
    ],
)
def test_a_run_of_other_requests_or_answers_is_no_measurement(
    planned: list[Request], other: dict[str, object], message: str
) -> None:
    with pytest.raises(AnalyzerError, match=message):
        read_profile(profile(exported(A, 0, 1), {**exported(B, 0, 1), **other}), planned)
