"""Requests and answers of each protocol, and of perf_analyzer: only exactly the requested load is a measurement."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from perf import perf_analyzer
from perf.load.protocols import Protocol, Request, Target, body, path, read_answer
from perf.load.records import Record
from perf.perf_analyzer import AnalyzerError, measure, read_profile


def sse(*events: object) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def chunk(text: str, tokens: int, finish: str = "", prompt: int = 0) -> dict[str, object]:
    counts = {"num_output_tokens": tokens, "num_input_tokens": prompt}
    return {"text_output": text, "finish_reason": finish, **counts}


def choice(text: str, finish: str | None = None, **more: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more}


def usage(completion: int, prompt: int = 7, cached: int | None = None) -> dict[str, object]:
    counts = {"completion_tokens": completion, "prompt_tokens": prompt, "total_tokens": prompt + completion}
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"usage": counts | details}


CHUNKS = sse(chunk("é", 1), chunk(" b c", 3), chunk("", 1, "length", prompt=7) | {"num_cached_tokens": 5})
# vLLM: the last token comes with the finish_reason, then the usage alone, then an event that is not JSON.
VLLM = sse(choice("é"), choice(""), choice("c", "length"), {"choices": [], **usage(3, cached=5)}) + b"data: [DONE]\n\n"
# Without null in the JSON, and an end without a token, with its usage.
COMPACT = sse(
    {"choices": [{"index": 0, "text": "é"}]},
    {"choices": [{"index": 0, "text": "b"}]},
    {"choices": [{"index": 0, "text": "", "finish_reason": "length"}], **usage(2)},
)
# A chat begins with its role.
CHAT = sse(
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": "length"}], **usage(2)},
)
COUNTS = {"completion_tokens": 9, "prompt_tokens": 7}
DRAFTS = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2}
UNARY = json.dumps(chunk("all of it", 5, "length", prompt=7)).encode()


def read(protocol: Protocol, *parts: bytes) -> Record:
    """Read an answer whose part number n arrived at time n, and its end one later."""
    record = Record(0.0, ended=float(len(parts)))
    chunks = [(float(number), part) for number, part in enumerate(parts)]
    read_answer(Target("t", protocol, "", "m", keep_answers=True), Request("é", 9), chunks, True, record)
    return record


@pytest.mark.parametrize(
    ("protocol", "content", "events", "tokens", "cached"),
    [
        ("triton_stream", CHUNKS, 3, 5, 5),
        ("openai_completions", VLLM, 3, 3, 5),
        ("openai_completions", COMPACT, 2, 2, None),
        ("openai_chat", CHAT, 3, 2, None),
        ("triton_generate", UNARY, 0, 5, None),
    ],
)
def test_counts_do_not_depend_on_where_the_bytes_are_split(
    protocol: Protocol, content: bytes, events: int, tokens: int, cached: int | None
) -> None:
    splits = [[content], [content[place : place + 1] for place in range(len(content))]]
    splits += [[content[:border], content[border:]] for border in range(1, len(content), 7)]
    for parts in splits:
        answer = read(protocol, *parts)
        assert (len(answer.token_times), answer.output_tokens, answer.prompt_tokens) == (events, tokens, 7)
        assert (answer.cached_tokens, answer.error) == (cached, "")


@pytest.mark.parametrize(
    "end",
    [
        {"usage": COUNTS, "timings": {"draft_n": 5, "draft_n_accepted": 3}},
        {"usage": {**COUNTS, "completion_tokens_details": DRAFTS}},
    ],
)
def test_drafted_tokens_are_counted_by_either_server(end: dict[str, object]) -> None:
    answer = read("openai_chat", CHAT, sse({"choices": [], **end}))
    assert (answer.accepted_tokens, answer.rejected_tokens) == (3, 2)


def test_the_arguments_of_a_tool_call_are_text() -> None:
    calls = [[{"index": 0, "function": {"name": "f", "arguments": text}}] for text in ("", '{"a"', ": 1}")]
    events = [{"choices": [{"index": 0, "delta": {"tool_calls": call}}]} for call in calls]
    assert read("openai_chat", sse(*events), CHAT).text == '{"a": 1}ab'


def test_a_token_has_the_time_of_the_bytes_that_end_its_event() -> None:
    first, second, last = CHUNKS.split(b"\n\n")[:3]
    answer = read("triton_stream", first[:10], first[10:], b"\n\n" + second + b"\n", b"\n" + last, b"\n\n")
    assert answer.token_times == [2.0, 3.0, 4.0]
    # Tokens without text have the time of the stream's end.
    end = sse({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], **usage(2)})
    assert read("openai_completions", b"", end).token_times == [2.0]


@pytest.mark.parametrize(
    ("protocol", "content", "message"),
    [
        ("triton_stream", sse(chunk("a", 1), {"error": "out of\nslots"}), "answered with an error: out of\nslots"),
        ("triton_stream", sse(chunk("a", 1)), "without a finish_reason, after 1 events"),
        ("openai_completions", sse(choice("a", "length")), "without a usage"),
        ("triton_stream", b"data: nonsense\n\n", "invalid JSON: b'nonsense'"),
        ("triton_generate", b'{"text_output": "all"}', "num_output_tokens is None, must be an integer"),
    ],
)
def test_a_bad_answer_is_an_error(protocol: Protocol, content: bytes, message: str) -> None:
    assert re.search(message, read(protocol, content).error)


@pytest.mark.parametrize(
    ("protocol", "where", "expected"),
    [
        ("triton_generate", "/v2/models/m/generate", {"max_tokens": 9, "min_tokens": 9, "stream": False}),
        ("triton_stream", "/v2/models/m/generate_stream", {"max_tokens": 9, "min_tokens": 9, "stream": True}),
        ("openai_completions", "/v1/completions", {"max_tokens": 9, "stream": True, "temperature": 0.0}),
        ("openai_chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": "é"}], "max_tokens": 9}),
    ],
)
def test_each_protocol_asks_for_the_exact_length(protocol: Protocol, where: str, expected: dict[str, object]) -> None:
    target = Target("t", protocol, "http://127.0.0.1:1", "m", {"extra": 1})
    fields = json.loads(body(target, Request("é", 9)))
    assert path(target) == where
    assert expected.items() <= fields.items()
    assert fields["extra"] == 1


@pytest.mark.parametrize(
    ("protocol", "field", "base"), [("triton_stream", "lora_name", None), ("openai_completions", "model", "llama")]
)
def test_a_request_names_its_adapter_as_the_protocol_does(protocol: Protocol, field: str, base: str | None) -> None:
    target = Target("ours", protocol, "", "llama")
    assert json.loads(body(target, Request("a", 1, adapter="lora3")))[field] == "lora3"
    assert json.loads(body(target, Request("a", 1))).get(field) == base


def test_a_requests_own_fields_come_last() -> None:
    target = Target("t", "openai_completions", "http://127.0.0.1:1", "m", {"temperature": 0.5, "seed": 1})
    fields = json.loads(body(target, Request("é", 0, fields={"max_tokens": 7, "seed": 2, "stream": False})))
    assert (fields["max_tokens"], fields["temperature"], fields["seed"]) == (7, 0.5, 2)
    # OpenAI's protocol refuses the options of a stream without one.
    assert "stream_options" not in fields


def test_an_answer_without_a_stream_is_counted_by_its_usage() -> None:
    content = json.dumps({"choices": [{"index": 0, "text": "ab"}], **usage(2, cached=5)}).encode()
    record = Record(0.0, ended=1.0)
    request = Request("é", 0, fields={"stream": False})
    read_answer(Target("t", "openai_completions", "", "m"), request, [(0.5, content)], True, record)
    assert (record.output_tokens, record.prompt_tokens, record.cached_tokens, record.error) == (2, 7, 5, "")


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
