"""Refused requests: OpenAI's form of an error, with the field's name, its value and the bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from frontend.descriptions import CONTEXT
from frontend.endpoints import Endpoint, Json, check_refusal, error_of
from frontend.fake_triton import FakeTriton
from httpx import Response

MAXIMUM = "this model's maximum context length is 512 tokens"
NO_ROOM = f"CONTEXT_LENGTH: max_tokens is 600; it must be at most 500; {MAXIMUM}"
TOO_LONG = f"CONTEXT_LENGTH: text_input is 600 tokens; it must be at most 511; the prompt is too long: {MAXIMUM}"
USER: Json = {"role": "user", "content": "a"}
ADD: Json = {"type": "function", "function": {"name": "add"}}
OTHER: Json = {"type": "function", "function": {"name": "b", "parameters": {"$defs": {"N": {"type": "string"}}}}}
THIRD: Json = {"type": "function", "function": {"name": "c", "parameters": {"$defs": {"N": {"type": "integer"}}}}}
SUB: Json = {"type": "function", "function": {"name": "sub"}}
FLAT: Json = {"type": "function", "name": "add"}
ALLOWED: Json = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}]}
IMAGE: Json = {"type": "image_url", "image_url": {"url": "x"}}
OUTPUT: Json = {"type": "function_call_output", "call_id": "1", "output": "2"}
TWO_GUIDES: Json = {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}
BOTH_TRUE: Json = {"continue_final_message": True, "add_generation_prompt": True}
TWO_PATTERNS: Json = {
    "structured_outputs": {"json": {}, "whitespace_pattern": " "},
    "guided_whitespace_pattern": " ",
}
Row = tuple[Json, str, str]


def _call(arguments: str) -> Json:
    return {"type": "function_call", "call_id": "1", "name": "add", "arguments": arguments}


def _chat_of_a_call(arguments: str) -> Json:
    call = {"id": "c", "function": {"name": "add", "arguments": arguments}}
    return {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}


# One row for each rule; test_hostile_bodies.py puts any value into any field.
CHATS: list[Row] = [
    ({"temperature": 3}, "temperature", "temperature is 3; it must be less than or equal to 2"),
    ({"temprature": 1}, "temprature", "temprature is unknown"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "give one of them"),
    ({"stop": 5}, "stop", "stop is 5; it must be a string or a list of strings"),
    ({"stop": "ä" * 513}, "stop", "at most 1024 bytes"),
    ({"metadata": {str(key): "" for key in range(17)}}, "metadata", "; it must have at most 16 items"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x", "logit_bias.x is 'x'"),
    ({"top_logprobs": 3}, "top_logprobs", "top_logprobs needs logprobs to be true"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "is 0; it must be -1 or at least 1"),
    ({"truncate_prompt_tokens": CONTEXT}, "truncate_prompt_tokens", f"it must be -1, or 1 … {CONTEXT - 1} (max_"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream to be true"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not supported"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "'robot'; it must be one of 'system'"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content", "messages[1].content is missing"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type", "'image_url'"),
    ({"prediction": {"type": "text", "content": "a"}}, "prediction.type", "'text'; it must be 'content'"),
    ({"functions": []}, "functions", "functions is not supported: use tools"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "are both given"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs a JSON guide"),
    (TWO_PATTERNS, "structured_outputs.whitespace_pattern", "are both given"),
    (BOTH_TRUE, "continue_final_message", "one must be false"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "a template is code"),
    ({"tool_choice": "auto"}, "tool_choice", "tool_choice is given without tools"),
    ({"tools": [ADD], "tool_choice": 5}, "tool_choice", "none, auto, required, or an object"),
    ({"tools": [ADD], "tool_choice": SUB}, "tool_choice.function.name", "one of the tools: add"),
    ({"tools": [ADD, ADD]}, "tools", "different names"),
    ({"tools": [THIRD, OTHER], "tool_choice": "required"}, "tools[1].function.parameters.$defs", "the same in every"),
    *(
        (_chat_of_a_call(arguments), "messages[1].tool_calls[0].function.arguments", "a JSON object")
        for arguments in ("{", "[]", '{"a": "\\ud800"}', "[" * 5000)
    ),
]
COMPLETIONS: list[Row] = [
    ({"prompt": None}, "prompt", "a text, a list of texts, a list of tokens"),
    ({"prompt": [[1], []]}, "prompt[1]", "at least 1 item"),
    ({"prompt": ["a"] * 129}, "prompt", "129 prompts"),
    ({"suffix": "x"}, "suffix", "suffix is not supported"),
    ({"best_of": 2}, "best_of", "best_of is not supported"),
]
RESPONSES: list[Row] = [
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage", "is unknown"),
    ({"input": None}, "input", "a string or a list of items"),
    ({"input": ["a"]}, "input[0]", "an object"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "nothing is stored"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "'input_text'"),
    ({"input": [USER, _call("[1]")]}, "input[1].arguments", "a JSON object"),
    ({"input": [USER, OUTPUT, _call("{}")]}, "input[1].call_id", "a function_call before it"),
    ({"input": [_call("{}"), {**OUTPUT, "output": [IMAGE]}]}, "input[1].output[0].type", "'image_url'"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", "at least one message"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "missing"),
    (TWO_GUIDES, "structured_outputs", "text.format and structured_outputs are both given"),
    (
        {"tools": [FLAT | {"name": "response_format"}] * 2},
        "tools",
        "['response_format', 'response_format']; it must be",
    ),
    ({"tool_choice": ALLOWED}, "tool_choice", "tool_choice is given without tools"),
    ({"tools": [FLAT], "tool_choice": FLAT | {"name": "sub"}}, "tool_choice.name", "one of the tools: add"),
    ({"tools": [FLAT], "tool_choice": ALLOWED}, "tool_choice.tools[0].name", "one of the tools: add"),
    ({"top_logprobs": 2}, "top_logprobs", "needs include"),
    ({"store": True}, "store", "nothing is stored; send false"),
    ({"background": True}, "background", "not supported"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored"),
]
TOKENIZATIONS: list[Row] = [
    ({}, "prompt", "neither of prompt and messages is given"),
    ({"messages": [USER], **BOTH_TRUE}, "continue_final_message", "one must be false"),
]


def _tokenize(served: Endpoint, **fields: object) -> Response:
    return served.post("/tokenize", **fields)


@pytest.mark.parametrize(
    ("ask", "fields", "param", "message"),
    [
        *((Endpoint.chat, *row) for row in CHATS),
        *((Endpoint.complete, *row) for row in COMPLETIONS),
        *((Endpoint.respond, *row) for row in RESPONSES),
        *((_tokenize, *row) for row in TOKENIZATIONS),
    ],
)
def test_a_bad_field_is_refused_by_name(
    served: Endpoint, triton: FakeTriton, ask: Callable[..., Response], fields: Json, param: str, message: str
) -> None:
    check_refusal(ask(served, **fields), param, message)
    assert triton.requests == []


def test_each_kind_of_refusal_has_its_code(served: Endpoint) -> None:
    for fields, code in (
        ({"prompt": "a", "temperature": 3}, "invalid_value"),
        ({"prompt": "a", "temperature": "warm"}, "invalid_type"),
        ({"prompt": "a", "temprature": 1}, "unknown_parameter"),
        ({"prompt": "a", "suffix": "b"}, "unsupported_parameter"),
        ({}, "missing_required_parameter"),
    ):
        assert error_of(served.post("/v1/completions", **fields))["code"] == code


def test_an_unknown_model_is_404_with_the_known_names(served: Endpoint) -> None:
    response = served.chat(model="gpt-4")
    assert response.status_code == 404
    assert error_of(response) == {
        "message": "model is 'gpt-4'; it must be one of pydoc-llama",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), ("/v1/completions", 405)])
def test_an_unknown_path_or_method_is_refused_in_openais_form(served: Endpoint, path: str, status: int) -> None:
    response = served.http.get(path)
    assert response.status_code == status
    error = error_of(response)
    assert (error["message"], error["code"]) == (f"there is no GET {path}", "unknown_url")
    assert response.headers.get("allow") == (None if status == 404 else "POST")


@pytest.mark.parametrize(
    ("message", "code", "param", "name"),
    [
        ("INVALID_ARG: stop_words is bad; it must be good", 400, "stop", "invalid_value"),
        ("INVALID_ARG: stop_words is the server is stopping; it must be good", 400, "stop", "invalid_value"),
        ("INVALID_ARG: guided_decoding_guide is no schema; it must be one", 400, "response_format", "invalid_value"),
        ("INVALID_ARG: input_ids is 9 tokens; it must be at most 8", 400, "messages", "invalid_value"),
        ("INVALID_ARG: min_tokens, ignore_eos together allow no token", 400, "min_tokens", "invalid_value"),
        ("INVALID_ARG: guided_decoding_guide_type, stop_words allow no token", 400, "response_format", "invalid_value"),
        ("Something that names no input", 500, None, "internal_error"),
        ("Exceeds maximum queue size", 503, None, "overloaded"),
        ("INTERNAL: the server's log has the reason", 500, None, "internal_error"),
    ],
)
def test_an_error_of_the_model_names_the_requests_field(
    served: Endpoint, triton: FakeTriton, message: str, code: int, param: str | None, name: str
) -> None:
    triton.failing = message
    response = served.chat(stop=["a"], response_format={"type": "json_object"})
    error = error_of(response)
    assert response.status_code == code
    assert (error["param"], error["code"]) == (param, name)
    assert ("retry-after" in response.headers) == (code == 503)


@pytest.mark.parametrize(
    ("ask", "fields", "message", "param"),
    [
        (Endpoint.chat, {"stream": True}, TOO_LONG, "messages"),
        (Endpoint.chat, {"max_completion_tokens": 600}, NO_ROOM, "max_completion_tokens"),
        (Endpoint.respond, {"max_output_tokens": 600, "stream": True}, NO_ROOM, "max_output_tokens"),
    ],
)
def test_a_request_beyond_the_context_has_the_words_clients_search_for(
    served: Endpoint, triton: FakeTriton, ask: Callable[..., Response], fields: Json, message: str, param: str
) -> None:
    triton.failing = message
    response = ask(served, **fields)
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert error["message"] == param + message.partition(": ")[2].removeprefix("text_input").removeprefix("max_tokens")


def test_the_first_bad_token_is_named(served: Endpoint) -> None:
    check_refusal(served.post("/detokenize", tokens=[99999]), "tokens[0]", "tokens[0] is 99999")
    tokens = b'{"tokens": [' + b'"",' * 1_000_000 + b"1]}"
    response = served.http.post("/detokenize", content=tokens, timeout=10)
    assert (response.status_code, error_of(response)["param"]) == (400, "tokens[0]")


def test_all_unknown_fields_of_a_body_are_counted(served: Endpoint) -> None:
    fields = b'{"model": "pydoc-llama", "prompt": "a"%b}' % b"".join(b',"%d":1' % n for n in range(300_000))
    response = served.http.post("/v1/completions", content=fields, timeout=10)
    assert response.status_code == 400
    assert error_of(response)["message"] == "the body violates the schema 300000 times"
