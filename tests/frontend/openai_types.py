"""Responses and their events as openai-python's types read them, without unknown, missing or mistyped fields."""

from __future__ import annotations

import httpx
from frontend.endpoints import Json, named_events
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

_EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def read_response(body: Json) -> Response:
    """Return a response object, checked."""
    # OpenAI's servers send it; the library has no such field.
    assert body["store"] is False
    response = Response.model_validate({name: value for name, value in body.items() if name != "store"}, strict=True)
    check_names(response)
    return response


def read_events(response: httpx.Response) -> list[ResponseStreamEvent]:
    """Return the events of a stream, checked: numbered, named and typed."""
    events = []
    for number, fields in enumerate(named_events(response)):
        assert fields["sequence_number"] == number
        if isinstance(body := fields.get("response"), dict):
            read_response(body)
            del body["store"]
        event = _EVENT.validate_python(fields, strict=True)
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
