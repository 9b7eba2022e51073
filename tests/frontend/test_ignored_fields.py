"""Fields without effect: hints that are ignored, and unknown fields under `unknown_fields` ignore."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from frontend.endpoints import Endpoint, Json, check_refusal, endpoint
from frontend.fake_triton import FakeTriton
from httpx import Response

HEADER = "x-ignored-parameters"
Ask = Callable[..., Response]
USER: Json = {"role": "user", "content": "a"}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
BREAKPOINT = {"text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}
TOOL: Json = {"type": "function", "function": {"name": "f", "parameters": {}, **EPHEMERAL}, **EPHEMERAL}
PLAIN: Json = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL: Json = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture(scope="module")
def lenient_endpoint(shared_triton: FakeTriton) -> Iterator[Endpoint]:
    with endpoint(shared_triton.port, unknown_fields="ignore") as served:
        yield served


@pytest.fixture
def lenient(triton: FakeTriton, lenient_endpoint: Endpoint) -> Endpoint:
    """An endpoint that ignores unknown fields."""
    return lenient_endpoint


# What vllm-router 0.1.17 adds.
ROUTERS: Json = {"no_stop_trim": False, "return_hidden_states": False}
ROUTERS_OF_CHATS: Json = ROUTERS | dict.fromkeys(("separate_reasoning", "stream_reasoning", "include_reasoning"), True)
OLLAMAS: Json = {"guided_decoding_backend": "outlines", "keep_alive": -1, "num_ctx": 2048}
ENCRYPTED: Json = {"include": ["reasoning.encrypted_content"]}
# What is sent, the same without what is ignored, and the header.
HINTS: list[tuple[Ask, Json, Json, str]] = [
    (Endpoint.complete, OLLAMAS | ROUTERS, {}, ", ".join(sorted(OLLAMAS | ROUTERS))),
    (Endpoint.chat, ROUTERS_OF_CHATS, {}, ", ".join(sorted(ROUTERS_OF_CHATS))),
    (Endpoint.chat, {"keep_alive": "5m", "store": False, "stream": True}, {"stream": True}, "keep_alive, store"),
    (
        Endpoint.chat,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", **EPHEMERAL}], **EPHEMERAL}]}
        | {"tools": [TOOL]},
        {"messages": [USER], "tools": [PLAIN]},
        "messages.cache_control, messages.content.cache_control, tools.cache_control, tools.function.cache_control",
    ),
    (
        Endpoint.chat,
        {"messages": [USER, {"role": "assistant", "tool_calls": [{**CALL, "index": 0}], "refusal": "no"}, USER]},
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, USER]},
        "messages.refusal, messages.tool_calls.index",
    ),
    (
        Endpoint.respond,
        {"input": [{"role": "user", "content": [{"type": "input_text", **BREAKPOINT}]}]},
        {"input": [USER]},
        "input.content.prompt_cache_breakpoint",
    ),
    (
        Endpoint.respond,
        ENCRYPTED | {"reasoning": {"effort": "high"}, "text": {"verbosity": "low"}, "truncation": "auto", "user": "me"},
        {},
        "include.reasoning.encrypted_content, reasoning, text.verbosity, truncation, user",
    ),
]


@pytest.mark.parametrize(("ask", "fields", "same", "named"), HINTS)
def test_a_hint_changes_nothing_and_is_named_in_the_header(
    served: Endpoint, triton: FakeTriton, ask: Ask, fields: Json, same: Json, named: str
) -> None:
    assert HEADER not in ask(served, **same).headers
    without = triton.last.inputs
    response = ask(served, **fields)
    assert (response.status_code, response.headers[HEADER]) == (200, named)
    # Each request has a seed of its own.
    assert triton.last.inputs == without | {"seed": triton.last.inputs["seed"]}


def test_the_search_for_ignored_fields_ends_at_a_number_of_objects(served: Endpoint) -> None:
    response = served.chat(messages=[*[USER] * 10_000, {**USER, "refusal": "no", "role": "assistant"}], user="me")
    assert (response.status_code, response.headers[HEADER]) == (400, "user")


def test_repeat_penalty_is_the_repetition_penalty(served: Endpoint, triton: FakeTriton) -> None:
    assert HEADER not in served.chat(repeat_penalty=1.25).headers
    assert triton.last.value("repetition_penalty") == 1.25
    assert served.chat(repeat_penalty=1.5, repetition_penalty=1.5).status_code == 200
    both = served.chat(repeat_penalty=1.5, repetition_penalty=1.25)
    check_refusal(both, "repetition_penalty", "give one of them")
    triton.failing = "INVALID_ARG: repetition_penalty is bad; it must be good"
    check_refusal(served.chat(repeat_penalty=1.25), "repeat_penalty", "repeat_penalty is bad")


def test_unknown_fields_are_left_out_wherever_they_are(lenient: Endpoint, triton: FakeTriton) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a", "a": 1}], "b": 1, "user": "c"}
    function = {"name": "f", "parameters": {"x": 1}, "d": 1}
    fields: Json = {"stream": True, "stream_options": {"e": 1}, "think": True, "mirostat": None, "user": "me"}
    response = lenient.chat(messages=[message], tools=[{"type": "function", "function": function}], **fields)
    assert response.status_code == 200
    expected = ["messages.b", "messages.content.a", "messages.user", "mirostat", "stream_options.e", "think"]
    assert response.headers[HEADER] == ", ".join([*expected, "tools.function.d", "user"])
    assert '"parameters": {"x": 1}' in triton.prompt
    assert '"d": 1' not in triton.prompt


def test_every_path_with_a_body_leaves_them_out(lenient: Endpoint) -> None:
    parts = [{"type": "input_text", "text": "a", "b": 1}]
    tools = [{"type": "function", "name": "f", "parameters": {}, "d": 1}]
    response = lenient.respond(input=[{"role": "user", "content": parts, "c": 1}], tools=tools, temprature=1)
    assert (response.status_code, response.headers[HEADER]) == (200, "input.c, input.content.b, temprature, tools.d")
    response = lenient.message(messages=[USER | {"content": [{"type": "text", "text": "a", "b": 1}], "c": 1}])
    assert (response.status_code, response.headers[HEADER]) == (200, "messages.c, messages.content.b")
    assert lenient.post("/detokenize", tokens=[1], temprature=1).headers[HEADER] == "temprature"


def test_bad_values_and_refused_fields_are_refused_beside_unknown_ones(lenient: Endpoint, triton: FakeTriton) -> None:
    check_refusal(lenient.chat(foo=1, functions=[]), "functions", "")
    check_refusal(lenient.chat(foo=1, messages=[USER, {"role": "user"}]), "messages[1].content", "")
    options = {"include_usage": 1}
    check_refusal(lenient.chat(foo=1, stream=True, stream_options=options), "stream_options.include_usage", "")
    assert triton.requests == []


def test_an_unknown_name_is_safe_in_the_header(lenient: Endpoint) -> None:
    for name, shown in (
        ("a\r\nset-cookie: b", "a??set-cookie??b"),
        ("ümlaut, 🙂", "?mlaut???"),
        ("a" * 5000, "a" * 64),
        ("__class__", "__class__"),
    ):
        response = lenient.complete(**{name: {"nested": [1]}})
        assert (response.status_code, response.headers[HEADER]) == (200, shown)


def test_many_unknown_fields_are_named_within_a_bound(lenient: Endpoint) -> None:
    fields = b"".join(b',"%060d":1' % number for number in range(50_000))
    response = lenient.http.post("/v1/completions", content=b'{"model":"pydoc-llama","prompt":"a"%b}' % fields)
    assert response.status_code == 200
    names = response.headers[HEADER].split(", ")
    assert names[-1] == "..."
    assert 900 < len(response.headers[HEADER]) <= 1029
