"""Refused messages, and other errors of /v1/messages: Anthropic's form, with the field's name, value and bound."""

from __future__ import annotations

from pathlib import Path

import pytest
from frontend.client_types import assistant, read_error, read_message, user
from frontend.endpoints import Endpoint, Json, endpoint
from frontend.fake_triton import FakeTriton

ADD: Json = {"name": "add", "input_schema": {"type": "object"}}
FORMAT: Json = {"type": "json_schema", "schema": {"type": "object"}}
IMAGE: Json = {"type": "image", "source": {"type": "url", "url": "x"}}
RESULT: Json = {"type": "tool_result", "tool_use_id": "1", "content": "2"}


REFUSED: list[tuple[Json, str]] = [
    ({"temperature": 1.5}, "temperature is 1.5; it must be less than or equal to 1"),
    ({"stop_sequences": [""]}, "stop_sequences[0] is ''"),
    ({"container": "c"}, "container is not supported"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id is 5; it must be a valid string"),
    ({"metadata": {"user_id": "a" * 513}}, "it must have at most 512 characters"),
    ({"messages": [user(IMAGE)]}, "messages[0].content[0] is not supported: it is a block of type 'image'"),
    ({"messages": [user({"text": "a"})]}, "it must be a block with a type"),
    ({"messages": [user({"type": "text", "text": "a", "citations": [{}]})]}, "citations is not supported"),
    ({"messages": [user(RESULT | {"content": [IMAGE]})]}, "messages[0].content[0].content[0] is not supported"),
    ({"messages": [user(RESULT)]}, "messages[0].content[0].tool_use_id is '1'; it must be the id of a"),
    (
        {"messages": [user(), assistant({"type": "thinking", "thinking": "a"})]},
        "messages[1].content is ['thinking']; it must be a list with a text or a tool_use",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "a"}]}, "tools[0].type is 'web_search_20250305'; it must be"),
    ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice.name is 'b'; it must be one of"),
    ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name is None"),
    ({"tool_choice": {"type": "any"}}, "tool_choice is given without tools"),
    ({"output_format": FORMAT, "output_config": {"format": FORMAT}}, "are both given"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_a_bad_field_is_refused_by_name(served: Endpoint, triton: FakeTriton, fields: Json, message: str) -> None:
    response = served.message(**fields)
    error = read_error(response).error
    assert (response.status_code, error.type) == (400, "invalid_request_error")
    assert message in error.message
    assert triton.requests == []


def test_a_refusal_of_the_model_names_the_requests_field(served: Endpoint, triton: FakeTriton) -> None:
    triton.failing = "INVALID_ARG: stop_words, guided_decoding_guide together allow no token"
    error = read_error(served.message(output_config={"format": FORMAT})).error
    assert error.message == "stop_sequences, output_config.format together allow no token"


def test_an_error_of_the_server_has_anthropics_type(served: Endpoint, triton: FakeTriton) -> None:
    for failing, status, kind in (
        ("Exceeds maximum queue size", 503, "overloaded_error"),
        ("INTERNAL: the server's log has the reason", 500, "api_error"),
    ):
        triton.failing = failing
        response = served.message()
        assert (response.status_code, read_error(response).error.type) == (status, kind)


def test_a_request_that_is_not_served_has_anthropics_error(triton: FakeTriton, keys: Path) -> None:
    with endpoint(triton.port, api_keys_file=keys, max_body_bytes=2000) as served:
        assert read_error(served.message()).error.type == "authentication_error"
        served.http.headers["x-api-key"] = "sk-first"
        assert read_message(served.message()).role == "assistant"
        assert read_error(served.message(model="claude-opus-4-5")).error.type == "not_found_error"
        assert read_error(served.http.post("/v1/messages/batches")).error.type == "not_found_error"
        assert "the client adds /v1 to its base URL" in read_error(served.http.post("/v1/v1/messages")).error.message
        assert read_error(served.http.get("/v1/messages")).error.type == "invalid_request_error"
        too_large = served.message(system="a" * 2000)
        assert read_error(too_large).error.message == "the body is too large; it must be at most 2000 bytes"
        assert too_large.json()["error"]["type"] == "request_too_large"
