"""perf_analyzer's input, and its profile export: only exactly the requested load is a measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from triton_llama.sampling_params import SamplingParams
from triton_llama.tensors import prepare

from perf.analyzer.binary import AnalyzerError
from perf.analyzer.run import inputs, read_profile
from perf.load.protocols import Request

SECOND = 1_000_000_000
BEGAN = 1_795_245_759 * SECOND
A, B, C = Request("a", 5), Request("b", 6), Request("c", 7)


def test_every_request_has_the_client_s_set_of_inputs() -> None:
    requests = [Request('a "quoted"\nline', 7), Request("ä€𝄞", 1)]
    full_set = [tensor.name for tensor in prepare("any", SamplingParams()).tensors]
    for request, entry in zip(requests, json.loads(inputs(requests))["data"], strict=True):
        assert list(entry) == full_set
        assert entry["text_input"] == {"content": [request.prompt], "shape": [1]}
        # Neither an end token nor sampling can change the length.
        assert entry["max_tokens"]["content"] == entry["min_tokens"]["content"] == [request.output_tokens]
        assert entry["temperature"]["content"] == [0.0]


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


def written(folder: Path, *requests: dict[str, object]) -> Path:
    experiment = {"experiment": {"mode": "concurrency", "value": 2}, "requests": requests, "window_boundaries": []}
    path = folder / "profile.json"
    path.write_text(json.dumps({"experiments": [experiment], "version": "2.51.0", "service_kind": "triton"}))
    return path


def test_requests_are_read_in_the_order_of_sending(tmp_path: Path) -> None:
    path = written(tmp_path, exported(B, 0.25, 1.0), exported(A, 0.0, 0.5), exported(A, 1.0, 2.0))
    first, second, _ = read_profile(path, [A, B, A])
    assert (first.output_tokens, first.prompt_tokens, second.output_tokens) == (5, 20, 6)
    # Times are exact to less than a microsecond.
    assert (first.latency, second.latency) == pytest.approx((0.5, 0.75), abs=1e-6)


def test_an_empty_export_is_refused(tmp_path: Path) -> None:
    (tmp_path / "profile.json").touch()
    with pytest.raises(AnalyzerError, match="an empty profile export"):
        read_profile(tmp_path / "profile.json", [A])


@pytest.mark.parametrize(
    ("planned", "other", "message"),
    [
        ([A], {}, "to send 1 requests and sent 2: 0 are missing, 1 are others"),
        ([A, B, C], {}, "to send 3 requests and sent 2: 1 are missing"),
        # One entry twice instead of each once: other lengths are measured than reported.
        ([A, Request("c", 6)], {}, "1 are missing, 1 are others"),
        ([A, B], exported(B, 0, 1, tokens=3), "another length than requested: 3 tokens, not 6"),
        ([A, B], {"success": False}, "a request failed"),
    ],
)
def test_a_run_of_other_requests_or_answers_is_no_measurement(
    tmp_path: Path, planned: list[Request], other: dict[str, object], message: str
) -> None:
    path = written(tmp_path, exported(A, 0, 1), {**exported(B, 0, 1), **other})
    with pytest.raises(AnalyzerError, match=message):
        read_profile(path, planned)
