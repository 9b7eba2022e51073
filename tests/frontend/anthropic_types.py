"""Messages and their events as anthropic's types read them, without unknown, missing or mistyped fields."""

from __future__ import annotations

import httpx
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from frontend.endpoints import Json, named_events
from frontend.openai_types import check_names
from pydantic import TypeAdapter

_EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


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


def read_events(response: httpx.Response) -> list[RawMessageStreamEvent]:
    """Return the events of a stream, checked: named and typed, a ping after the first."""
    events = named_events(response)
    assert events.pop(1) == {"type": "ping"}
    checked = []
    for fields in events:
        event = _EVENT.validate_python(fields, strict=True)
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
