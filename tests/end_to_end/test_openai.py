"""The OpenAI endpoint with the real model: what it says is what the model says, and slots are freed.

The protocol's forms and refusals are tested with a small Triton in tests/frontend.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator

import httpx
import pytest
from end_to_end.metrics import Metrics
from end_to_end.openai_endpoint import in_front_of
from end_to_end.wires import ask, generate
from frontend.endpoints import HOST, Endpoint, Json, error_of, events_of
from frontend.openai_types import read_events, read_response
from openai.types.responses import ResponseCompletedEvent, ResponseFunctionToolCall, ResponseIncompleteEvent
from triton_local.server import LocalTriton

MODEL = "pydoc-llama"
PROMPT = "Return a list of"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["list", "dict"]}, "size": {"enum": [1, 22]}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "make", "parameters": SCHEMA}}
ANSWERS = [{"kind": kind, "size": size} for kind in ("list", "dict") for size in (1, 22)]


@pytest.fixture(scope="module")
def served(streaming: LocalTriton) -> Iterator[Endpoint]:
    with in_front_of(streaming) as endpoint:
        yield endpoint


def _chat(served: Endpoint, **fields: object) -> list[Json]:
    """Return the choices of a chat that isn't streamed."""
    response = served.chat(**fields)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert isinstance(choices, list)
    return choices


def _streamed(served: Endpoint, **fields: object) -> dict[int, tuple[str, str, str]]:
    """Return, of each choice of a streamed chat, its text, its calls' arguments and its finish reason."""
    choices: dict[int, tuple[str, str, str]] = {}
    for event in events_of(served.chat(stream=True, **fields)):
        assert isinstance(event["choices"], list)
        for choice in event["choices"]:
            text, arguments, reason = choices.get(choice["index"], ("", "", ""))
            delta = choice["delta"]
            calls = delta.get("tool_calls", [])
            arguments += "".join(call["function"].get("arguments", "") for call in calls)
            choices[choice["index"]] = (
                text + (delta.get("content") or ""),
                arguments,
                choice["finish_reason"] or reason,
            )
    return choices


def _message(choice: Json) -> Json:
    message = choice["message"]
    assert isinstance(message, dict)
    return message


def test_a_completion_is_the_models_own_streamed_or_not(served: Endpoint, streaming: LocalTriton) -> None:
    greedy = {"max_tokens": 20, "temperature": 0, "repetition_penalty": 1}
    expected = ask(streaming, generate, text_input=PROMPT, **greedy)
    answer = served.complete(prompt=PROMPT, **greedy).json()
    assert answer["choices"][0]["text"] == expected.text
    assert answer["usage"]["completion_tokens"] == expected.num_output_tokens
    assert answer["usage"]["prompt_tokens"] == expected.num_input_tokens
    events = events_of(served.complete(prompt=PROMPT, stream=True, **greedy))
    assert "".join(event["choices"][0]["text"] for event in events) == expected.text  # type: ignore[index]


def test_a_response_is_a_chats_answer_streamed_or_not(served: Endpoint) -> None:
    greedy: Json = {"temperature": 0, "repetition_penalty": 1}
    (choice,) = _chat(served, messages=[{"role": "user", "content": PROMPT}], max_tokens=20, **greedy)
    whole = read_response(served.respond(input=PROMPT, max_output_tokens=20, **greedy).json())
    assert whole.output_text == _message(choice)["content"]
    events = read_events(served.respond(input=PROMPT, max_output_tokens=20, stream=True, **greedy))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert isinstance(last, ResponseCompletedEvent | ResponseIncompleteEvent)
    # The prompt may be cached by now.
    assert last.response.usage is not None
    assert whole.usage is not None
    assert last.response.usage.output_tokens == whole.usage.output_tokens


def test_a_response_is_one_forced_call(served: Endpoint) -> None:
    tool = {"type": "function", "name": "make", "parameters": SCHEMA, "strict": True}
    fields: Json = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "seed": 3}
    (call,) = read_response(served.respond(**fields).json()).output
    assert isinstance(call, ResponseFunctionToolCall)
    assert json.loads(call.arguments) in ANSWERS
    last = read_events(served.respond(stream=True, **fields))[-1]
    assert isinstance(last, ResponseCompletedEvent)
    (streamed,) = last.response.output
    assert isinstance(streamed, ResponseFunctionToolCall)
    assert streamed.arguments == call.arguments


def test_a_prompt_beyond_the_context_is_refused_in_openais_words(served: Endpoint) -> None:
    response = served.complete(prompt="word " * 3000)
    assert response.status_code == 400
    assert (error_of(response)["param"], error_of(response)["code"]) == ("prompt", "context_length_exceeded")


def test_a_streamed_echo_has_the_logprobs_of_the_whole_answer(served: Endpoint) -> None:
    fields: Json = {"prompt": [PROMPT, "word " * 600], "truncate_prompt_tokens": 20, "echo": True, "logprobs": 1}
    fields |= {"n": 2, "temperature": 0, "repetition_penalty": 1, "max_tokens": 6}
    expected = served.complete(**fields).json()
    assert expected["usage"]["prompt_tokens"] == 20 + len(expected["choices"][0]["logprobs"]["tokens"]) - 6
    events = events_of(served.complete(stream=True, **fields))
    choices = [choice for event in events for choice in event["choices"]]  # type: ignore[attr-defined]  # JSON
    for whole in expected["choices"]:
        own = [choice for choice in choices if choice["index"] == whole["index"]]
        assert "".join(choice["text"] for choice in own) == whole["text"]
        for name, values in whole["logprobs"].items():
            assert [value for choice in own for value in choice["logprobs"][name]] == values


@pytest.mark.parametrize("stream", [False, True])
def test_refused_requests_leave_no_error_in_tritons_log(served: Endpoint, streaming: LocalTriton, stream: bool) -> None:
    before = _error_lines(streaming)
    for _ in range(10):
        assert served.complete(max_tokens=3000, stream=stream).status_code == 400
    # What Triton has logged about them is there once a later request is answered.
    assert served.complete(max_tokens=2).status_code == 200
    assert _error_lines(streaming) == before


def _error_lines(server: LocalTriton) -> list[str]:
    """Return Triton's own lines of the level error."""
    return re.findall(r"^E\d{4} .*", server.log_text(), re.MULTILINE)


def test_the_logprobs_of_a_chat_are_of_its_tokens(served: Endpoint) -> None:
    (choice,) = _chat(served, temperature=0, repetition_penalty=1, max_tokens=8, logprobs=True, top_logprobs=2)
    logprobs = choice["logprobs"]
    assert isinstance(logprobs, dict)
    assert "".join(token["token"] for token in logprobs["content"]) == _message(choice)["content"]
    for token in logprobs["content"]:
        likeliest, second = token["top_logprobs"]
        # Greedy.
        assert token["logprob"] == likeliest["logprob"] >= second["logprob"]
        assert bytes(token["bytes"]).decode() == token["token"]


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, None),
        ({"guided_regex": "(ab|cd)[0-9]{3}"}, "(ab|cd)[0-9]{3}"),
        ({"guided_choice": ["yes", 'no "really"\n']}, 'yes|no "really"\n'),
        ({"guided_grammar": 'root ::= "a" root | "b"'}, "a*b"),
    ],
)
def test_a_structured_text_has_its_form(served: Endpoint, fields: dict[str, object], form: str | None) -> None:
    for choice in _chat(served, temperature=1, seed=5, n=2, max_tokens=60, **fields):
        assert choice["finish_reason"] == "stop", choice
        text = str(_message(choice)["content"])
        assert re.fullmatch(form, text) if form else json.loads(text) in ANSWERS


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "make"}}])
def test_a_forced_call_has_valid_arguments_streamed_or_not(served: Endpoint, choice: object) -> None:
    request = {"tools": [TOOL], "tool_choice": choice, "temperature": 1, "seed": 3, "max_tokens": 280}
    (answer,) = _chat(served, parallel_tool_calls=False, **request)
    calls = _message(answer)["tool_calls"]
    assert isinstance(calls, list)
    (call,) = calls
    assert call["function"]["name"] == "make"
    assert json.loads(call["function"]["arguments"]) in ANSWERS
    assert answer["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    streamed = _streamed(served, parallel_tool_calls=False, **request)[0]
    assert streamed == ("", call["function"]["arguments"], answer["finish_reason"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(narrow_streaming: LocalTriton, stream: bool) -> None:
    metrics = Metrics(narrow_streaming)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 500, "min_tokens": 500, "stream": stream}
    with (
        in_front_of(narrow_streaming) as served,
        httpx.Client(base_url=f"http://{HOST}:{served.port}", timeout=1) as leaving,
        # An answer that isn't streamed takes longer than the client waits.
        contextlib.suppress(httpx.ReadTimeout),
        leaving.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert stream
        next(response.iter_raw())
    metrics.wait_for(1, "llama_requests_total", finish_reason="cancelled")
    assert "HandleCancellation called even when" not in narrow_streaming.log_text()
