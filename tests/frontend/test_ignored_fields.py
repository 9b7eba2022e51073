"""Fields without effect: hints that are ignored, and unknown fields under `unknown_fields` ignore."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from frontend.endpoints import Endpoint, Json, check_refusal, endpoint
from frontend.fake_triton import FakeTriton
from httpx import Response

HEADER = "x-ignored-parameters"
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
TOOL: Json = {"type": "function", "function": {"name": "f", "parameters": {}, **EPHEMERAL}, **EPHEMERAL}
ASKS = [Endpoint.chat, Endpoint.complete]


@pytest.fixture
def lenient(triton: FakeTriton) -> Iterator[Endpoint]:
    """An endpoint that ignores unknown fields."""
    with endpoint(triton.port, unknown_fields="ignore") as served:
        yield served


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize(
    "fields", [{"keep_alive": "5m"}, {"keep_alive": -1}, {"num_ctx": 2048}, {"guided_decoding_backend": "outlines"}]
)
def test_hints_of_both_paths_change_nothing(
    served: Endpoint, triton: FakeTriton, ask: Callable[..., Response], fields: Json
) -> None:
    ask(served)
    without = triton.last.inputs
    response = ask(served, **fields)
    assert (response.status_code, response.headers[HEADER]) == (200, ", ".join(fields))
    assert triton.last.inputs == without


@pytest.mark.parametrize("stream", [False, True])
def test_hints_of_a_chat_are_named_in_the_header(served: Endpoint, stream: bool) -> None:
    response = served.chat(reasoning_effort="low", verbosity="high", stream=stream)
    assert (response.status_code, response.headers[HEADER]) == (200, "reasoning_effort, verbosity")


def test_cache_control_changes_no_prompt(served: Endpoint, triton: FakeTriton) -> None:
    plain: Json = {"type": "function", "function": {"name": "f", "parameters": {}}}
    served.chat(messages=[{"role": "user", "content": "a"}], tools=[plain])
    without = triton.last.value("text_input")
    part = {"type": "text", "text": "a", **EPHEMERAL}
    response = served.chat(messages=[{"role": "user", "content": [part], **EPHEMERAL}], tools=[TOOL])
    assert response.status_code == 200
    names = "messages.cache_control, messages.content.cache_control, tools.cache_control, tools.function.cache_control"
    assert response.headers[HEADER] == names
    assert triton.last.value("text_input") == without


def test_a_breakpoint_of_the_prompt_cache_is_named_in_the_header(served: Endpoint) -> None:
    part = {"text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}
    chat = served.chat(messages=[{"role": "user", "content": [{"type": "text", **part}]}])
    item = {"role": "user", "content": [{"type": "input_text", **part}]}
    response = served.http.post("/v1/responses", json={"model": "pydoc-llama", "input": [item]})
    assert (chat.status_code, chat.headers[HEADER]) == (200, "messages.content.prompt_cache_breakpoint")
    assert (response.status_code, response.headers[HEADER]) == (200, "input.content.prompt_cache_breakpoint")


def test_what_an_answer_has_is_named_when_it_is_sent_back(served: Endpoint) -> None:
    call = {"id": "c", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    question = {"role": "user", "content": "a"}
    messages = [question, {"role": "assistant", "tool_calls": [call], "refusal": "no"}, question]
    response = served.chat(messages=messages)
    assert response.headers[HEADER] == "messages.refusal, messages.tool_calls.index"


def test_the_search_for_ignored_fields_ends_at_a_number_of_objects(served: Endpoint) -> None:
    messages = [{"role": "user", "content": "a"}] * 10_000
    response = served.chat(messages=[*messages, {"role": "assistant", "content": "b", "refusal": "no"}], user="me")
    assert (response.status_code, response.headers[HEADER]) == (400, "user")


@pytest.mark.parametrize("ask", ASKS)
def test_repeat_penalty_is_the_repetition_penalty(
    served: Endpoint, triton: FakeTriton, ask: Callable[..., Response]
) -> None:
    response = ask(served, repeat_penalty=1.25)
    assert HEADER not in response.headers
    assert triton.last.value("repetition_penalty") == 1.25
    assert ask(served, repeat_penalty=1.5, repetition_penalty=1.5).status_code == 200
    check_refusal(ask(served, repeat_penalty=1.5, repetition_penalty=1.25), "repetition_penalty", "give one of them")
    triton.failing = "INVALID_ARG: repetition_penalty is bad; it must be good"
    check_refusal(ask(served, repeat_penalty=1.25), "repeat_penalty", "repeat_penalty is bad")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"num_ctx": "2048"}, "num_ctx"),
        ({"keep_alive": True}, "keep_alive"),
        ({"keep_alive": "5" * 65}, "keep_alive"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"messages": [{"role": "user", "content": "a", "cache_control": 5}]}, "messages[0].cache_control"),
    ],
)
def test_a_hint_of_a_wrong_type_is_refused(served: Endpoint, fields: Json, param: str) -> None:
    check_refusal(served.chat(**fields), param, "it must")


def test_unknown_fields_are_left_out_wherever_they_are(lenient: Endpoint, triton: FakeTriton) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a", "a": 1}], "b": 1, "user": "c"}
    function = {"name": "f", "parameters": {"x": 1}, "d": 1}
    fields: Json = {"stream": True, "stream_options": {"e": 1}, "think": True, "mirostat": None, "user": "me"}
    response = lenient.chat(messages=[message], tools=[{"type": "function", "function": function}], **fields)
    assert response.status_code == 200
    expected = ["messages.b", "messages.content.a", "messages.user", "mirostat", "stream_options.e", "think"]
    assert response.headers[HEADER] == ", ".join([*expected, "tools.function.d", "user"])
    prompt = str(triton.last.value("text_input"))
    assert '"parameters": {"x": 1}' in prompt
    assert '"d": 1' not in prompt


def test_unknown_fields_of_a_responses_items_and_tools_are_left_out(lenient: Endpoint) -> None:
    item = {"role": "user", "content": [{"type": "input_text", "text": "a", "b": 1}], "c": 1}
    tool = {"type": "function", "name": "f", "parameters": {}, "d": 1}
    response = lenient.http.post("/v1/responses", json={"model": "pydoc-llama", "input": [item], "tools": [tool]})
    assert response.status_code == 200
    assert response.headers[HEADER] == "input.c, input.content.b, tools.d"


def test_every_path_with_a_body_leaves_them_out(lenient: Endpoint) -> None:
    for path, fields in (
        ("/v1/completions", {"model": "pydoc-llama", "prompt": "a"}),
        ("/v1/responses", {"model": "pydoc-llama", "input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        response = lenient.http.post(path, json={**fields, "temprature": 1})
        assert (response.status_code, response.headers[HEADER]) == (200, "temprature"), path


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"functions": []}, "functions"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}, "messages[1].content"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_bad_values_and_refused_fields_are_refused_beside_unknown_ones(
    lenient: Endpoint, triton: FakeTriton, fields: Json, param: str
) -> None:
    check_refusal(lenient.chat(foo=1, **fields), param, "")
    assert triton.requests == []


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\r\nset-cookie: b", "a??set-cookie??b"),
        ("ümlaut, 🙂", "?mlaut???"),
        ("", ""),
        ("a" * 5000, "a" * 64),
        ("model_extra", "model_extra"),
        ("ignored", "ignored"),
        ("__class__", "__class__"),
    ],
)
def test_an_unknown_name_is_safe_in_the_header(lenient: Endpoint, name: str, shown: str) -> None:
    response = lenient.complete(**{name: {"nested": [1]}})
    assert (response.status_code, response.headers[HEADER]) == (200, shown)


def test_many_unknown_fields_are_named_within_a_bound(lenient: Endpoint) -> None:
    fields = b"".join(b',"%060d":1' % number for number in range(50_000))
    response = lenient.http.post("/v1/completions", content=b'{"model":"pydoc-llama","prompt":"a"%b}' % fields)
    assert response.status_code == 200
    names = response.headers[HEADER].split(", ")
    assert names[-1] == "..."
    assert 900 < len(response.headers[HEADER]) <= 1029
    assert lenient.complete().status_code == 200
