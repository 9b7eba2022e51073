"""Refused requests: OpenAI's form of an error, with the field's name, its value and the bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from frontend.endpoints import Endpoint, Json, check_refusal, error_of
from frontend.fake_triton import CONTEXT, FakeTriton
from httpx import Response

MAXIMUM = "this model's maximum context length is 512 tokens"
NO_ROOM = f"CONTEXT_LENGTH: max_tokens is 600; it must be at most 500; {MAXIMUM}"
MESSAGE = {"role": "user", "content": "a"}


CHATS: list[tuple[Json, str, str]] = [
    ({"temperature": 3}, "temperature", "temperature is 3; it must be less than or equal to 2"),
    ({"temperature": True}, "temperature", "temperature is True; it must be a valid number"),
    ({"n": 0}, "n", "n is 0; it must be greater than or equal to 1"),
    ({"n": 1.5}, "n", "n is 1.5; it must be a valid integer"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "give one of them"),
    ({"stop": ["a"] * 17}, "stop", "at most 16 items"),
    ({"stop": ["a", ""]}, "stop[1]", "at least 1 character"),
    ({"stop": 5}, "stop", "stop is 5; it must be a string or a list of strings"),
    ({"stop": "ä" * 513}, "stop", "at most 1024 bytes"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x", "logit_bias.x is 'x'"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
    ({"top_logprobs": 3}, "top_logprobs", "top_logprobs needs logprobs to be true"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "is 0; it must be -1 or at least 1"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "is -2; it must be greater than or equal to -1"),
    ({"truncate_prompt_tokens": CONTEXT}, "truncate_prompt_tokens", f"it must be -1, or 1 … {CONTEXT - 1} (max_"),
    ({"truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens", "a valid integer"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream to be true"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "'robot'; it must be one of 'system'"),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "messages[0].role is missing"),
    ({"messages": [MESSAGE, {"role": "user"}]}, "messages[1].content", "messages[1].content is missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "a string or a list of text parts"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "'image_url'",
    ),
    ({"temprature": 1}, "temprature", "temprature is unknown"),
    ({"functions": []}, "functions", "functions is not supported: use tools"),
    ({"audio": {"voice": "x"}}, "audio", "audio is not supported"),
    ({"use_beam_search": True}, "use_beam_search", "use_beam_search is True; it must be False"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'; it must be one of 'text'"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "are both given"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not supported"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "one must be false",
    ),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "chat_template_kwargs has messages"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "a template is code"),
]
COMPLETIONS: list[tuple[Json, str, str]] = [
    ({"prompt": ""}, "prompt", "at least 1 character"),
    ({"prompt": None}, "prompt", "a text, a list of texts, a list of tokens"),
    ({"prompt": []}, "prompt", "at least 1 item"),
    ({"prompt": [1, "a"]}, "prompt[1]", "a valid integer"),
    ({"prompt": [[1], []]}, "prompt[1]", "at least 1 item"),
    ({"prompt": ["a"] * 129}, "prompt", "129 prompts"),
    ({"suffix": "x"}, "suffix", "suffix is not supported"),
    ({"best_of": 2}, "best_of", "best_of is not supported"),
    ({"truncate_prompt_tokens": CONTEXT}, "truncate_prompt_tokens", f"it must be -1, or 1 … {CONTEXT - 1} (max_"),
    ({"logprobs": True}, "logprobs", "a valid integer"),
]


@pytest.mark.parametrize(
    ("ask", "fields", "param", "message"),
    [*((Endpoint.chat, *row) for row in CHATS), *((Endpoint.complete, *row) for row in COMPLETIONS)],
)
def test_a_bad_field_is_refused_by_name(
    served: Endpoint, triton: FakeTriton, ask: Callable[..., Response], fields: Json, param: str, message: str
) -> None:
    check_refusal(ask(served, **fields), param, message)
    assert triton.requests == []


@pytest.mark.parametrize("fields", [{"stop": ["a"] * 17}, {"metadata": {str(key): "" for key in range(17)}}])
def test_a_refusal_of_too_many_items_ends_with_the_bound(served: Endpoint, fields: Json) -> None:
    assert str(error_of(served.chat(**fields))["message"]).endswith("; it must have at most 16 items")


@pytest.mark.parametrize(
    ("path", "fields", "code"),
    [
        ("/v1/completions", {"prompt": "a", "temperature": 3}, "invalid_value"),
        ("/v1/completions", {"prompt": "a", "temperature": "warm"}, "invalid_type"),
        ("/v1/completions", {"prompt": "a", "temprature": 1}, "unknown_parameter"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "unsupported_parameter"),
        ("/v1/chat/completions", {}, "missing_required_parameter"),
        ("/v1/embeddings", {"input": "a"}, "unsupported_endpoint"),
        ("/v1/nothing", {}, "unknown_url"),
    ],
)
def test_each_kind_of_refusal_has_its_code(served: Endpoint, path: str, fields: Json, code: str) -> None:
    response = served.http.post(path, json={"model": "pydoc-llama", **fields})
    assert error_of(response)["code"] == code


def test_an_unknown_model_is_404_with_the_known_names(served: Endpoint) -> None:
    response = served.chat(model="gpt-4")
    assert response.status_code == 404
    assert error_of(response) == {
        "message": "model is 'gpt-4'; it must be one of pydoc-llama",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"a": "\\ud800"}', b"[" * 5000, b'{"a":' * 5000])
def test_a_body_that_is_no_json_is_refused(served: Endpoint, body: bytes) -> None:
    response = served.http.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_json"


@pytest.mark.parametrize("body", [b"[]", b"null"])
def test_a_body_that_is_no_object_is_refused(served: Endpoint, body: bytes) -> None:
    response = served.http.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert "the body is" in str(error_of(response)["message"])


def test_embeddings_are_refused_clearly(served: Endpoint) -> None:
    response = served.http.post("/v1/embeddings", json={"model": "pydoc-llama", "input": "a"})
    assert response.status_code == 400
    assert "no embeddings" in str(error_of(response)["message"])


def test_a_refused_method_names_the_paths_own(served: Endpoint) -> None:
    assert served.http.put("/v1/completions").headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/responses/input_tokens", 405)],
)
def test_an_unknown_path_or_method_is_refused_in_openais_form(
    served: Endpoint, method: str, path: str, status: int
) -> None:
    response = served.http.request(method, path)
    assert response.status_code == status
    error = error_of(response)
    assert (error["message"], error["code"]) == (f"there is no {method} {path}", "unknown_url")


@pytest.mark.parametrize(
    ("message", "code", "param", "name"),
    [
        ("INVALID_ARG: stop_words is bad; it must be good", 400, "stop", "invalid_value"),
        ("INVALID_ARG: stop_words is the server is stopping; it must be good", 400, "stop", "invalid_value"),
        ("INVALID_ARG: stop_words is stub process; it must be good", 400, "stop", "invalid_value"),
        ("INVALID_ARG: guided_decoding_guide is no schema; it must be one", 400, "response_format", "invalid_value"),
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
    ("fields", "message", "param", "phrase"),
    [
        (
            {},
            f"CONTEXT_LENGTH: text_input is 600 tokens; it must be at most 511; the prompt is too long: {MAXIMUM}",
            "messages",
            "the prompt is too long: ",
        ),
        ({"max_tokens": 600}, NO_ROOM, "max_tokens", ""),
        ({"max_completion_tokens": 600}, NO_ROOM, "max_completion_tokens", ""),
    ],
)
def test_a_request_beyond_the_context_has_the_words_clients_search_for(
    served: Endpoint, triton: FakeTriton, fields: Json, message: str, param: str, phrase: str
) -> None:
    triton.failing = message
    response = served.chat(**fields)
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert str(error["message"]).endswith(f"; {phrase}{MAXIMUM}")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"model": "pydoc-llama", "prompt": [' + b"1.5," * 800_000 + b"1]}"),
        ("/detokenize", b'{"tokens": [' + b'"",' * 1_000_000 + b"1]}"),
    ],
    ids=["a list of wrong types", "wrong tokens"],
)
def test_the_first_violation_of_a_long_list_is_named(served: Endpoint, path: str, body: bytes) -> None:
    response = served.http.post(path, content=body, timeout=10)
    assert response.status_code == 400
    assert str(error_of(response)["param"]).endswith("[0]")


def test_violations_beyond_a_number_are_counted(served: Endpoint) -> None:
    body = b'{"model": "pydoc-llama", "prompt": "a"%b}' % b"".join(b',"%d":1' % n for n in range(300_000))
    response = served.http.post("/v1/completions", content=body, timeout=10)
    assert response.status_code == 400
    assert error_of(response)["message"] == "the body violates the schema 300000 times"
