"""perf_analyzer's input, and its profile export: only exactly the requested load is a measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from triton_llama.sampling_params import SamplingParams
from triton_llama.tensors import prepare
from triton_local.server import LocalTriton

from perf import perf_analyzer
from perf.load.protocols import Request
from perf.perf_analyzer import AnalyzerError, BadExportError, inputs, measure, read_profile

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


def profile(*requests: dict[str, object]) -> dict[str, object]:
    experiment = {"experiment": {"mode": "concurrency", "value": 2}, "requests": requests, "window_boundaries": []}
    return {"experiments": [experiment], "version": "2.51.0", "service_kind": "triton"}


def fake_analyzer(folder: Path, *exports: str) -> Path:
    """Return a program that leaves the next of these exports at each run, and ends with code 0."""
    for number, export in enumerate(exports):
        (folder / f"export-{number}").write_text(export)
    program = folder / "perf_analyzer"
    program.write_text(
        f"""#!/bin/sh
number=$(ls {folder}/ran-* 2>/dev/null | wc -l)
touch {folder}/ran-$number
cp {folder}/export-$number profile.json
echo "run $number of $*"
"""
    )
    program.chmod(0o755)
    return program


def test_requests_are_read_in_the_order_of_sending() -> None:
    export = profile(exported(B, 0.25, 1.0), exported(A, 0.0, 0.5), exported(A, 1.0, 2.0))
    first, second, _ = read_profile(export, [A, B, A])
    assert (first.output_tokens, first.prompt_tokens, second.output_tokens) == (5, 20, 6)
    # Times are exact to less than a microsecond.
    assert (first.latency, second.latency) == pytest.approx((0.5, 0.75), abs=1e-6)


def test_a_load_with_an_empty_export_is_run_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake_analyzer(tmp_path, "", json.dumps(profile(exported(A, 0.0, 0.5))))
    monkeypatch.setattr(perf_analyzer, "BINARY", program)
    measured, _ = measure("127.0.0.1:1", [A], 1, 0, 30.0)
    assert [record.output_tokens for record in measured.records] == [5]


def test_a_second_empty_export_is_an_error_with_command_and_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perf_analyzer, "BINARY", fake_analyzer(tmp_path, "", ""))
    with pytest.raises(BadExportError, match=r"twice: perf_analyzer -m llama (?s:.*)\nrun 1 of -m llama"):
        measure("127.0.0.1:1", [A], 1, 0, 30.0)


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
    planned: list[Request], other: dict[str, object], message: str
) -> None:
    with pytest.raises(AnalyzerError, match=message):
        read_profile(profile(exported(A, 0, 1), {**exported(B, 0, 1), **other}), planned)


def test_one_failed_request_fails_the_run(triton: LocalTriton) -> None:
    requests = [Request(f'Return the "{length}" of\nä€𝄞', length) for length in (3, 9, 1, 6, 100_000)]
    with pytest.raises(AnalyzerError, match="max_tokens is 100000; it must be at most"):
        measure(triton.grpc_url, requests, 2, 2, 120.0)
