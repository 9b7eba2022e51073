"""Answers and events as OpenAI's and Anthropic's types read them: no unknown, missing or mistyped fields."""

from __future__ import annotations

import httpx
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from frontend.endpoints import Json, named_events
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

_RESPONSE_EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
_MESSAGE_EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


def read_response(body: Json) -> Response:
    """Return a response object, checked."""
    # OpenAI's servers send it; the library has no such field.
    assert body["store"] is False
    response = Response.model_validate({name: value for name, value in body.items() if name != "store"}, strict=True)
    check_names(response)
    return response


def read_response_events(response: httpx.Response) -> list[ResponseStreamEvent]:
    """Return the events of a stream, checked: numbered, named and typed."""
    events = []
    for number, fields in enumerate(named_events(response)):
        assert fields["sequence_number"] == number
        if isinstance(body := fields.get("response"), dict):
            read_response(body)
            del body["store"]
        event = _RESPONSE_EVENT.validate_python(fields, strict=True)
        check_names(event)
        events.append(event)
    return events


def check_names(value: object) -> None:
    """Assert that no object has a field that the library's type lacks."""
    if isinstance(value, BaseModel):
        assert not value.model_extra, f"{type(value).__name__} has {value.model_extra}"
        for _, field in value:
            check_names(field)
    if isinstance(value, list):
        for element in value:
            check_names(element)


def user(*blocks: Json) -> Json:
    return {"role": "user", "content": [*blocks]}


def assistant(*blocks: Json) -> Json:
    return {"role": "assistant", "content": [*blocks]}


def read_message(response: httpx.Response) -> Message:
    """Return a message, checked."""
    assert response.status_code == 200, response.text
    message = Message.model_validate(response.json(), strict=True)
    check_names(message)
    return message


def read_message_events(response: httpx.Response) -> list[RawMessageStreamEvent]:
    """Return the events of a stream, checked: named and typed, a ping after the first."""
    events = named_events(response)
    assert events.pop(1) == {"type": "ping"}
    checked = []
    for fields in events:
        event = _MESSAGE_EVENT.validate_python(fields, strict=True)
        check_names(event)
        checked.append(event)
    return checked


def read_error(response: httpx.Response) -> ErrorResponse:
    """Return a refusal, checked; its id is the header's."""
    body = response.json()
    # Anthropic documents this type; the library has none for it.
    kind = body["error"]["type"]
    shown = {**body, "error": {**body["error"], "type": "api_error"}} if kind == "request_too_large" else body
    error = ErrorResponse.model_validate(shown, strict=True)
    check_names(error)
    assert error.request_id == response.headers["request-id"] == response.headers["x-request-id"]
    return error
