"""Responses and their events as openai-python's types read them, without unknown, missing or mistyped fields."""

from __future__ import annotations

import json

import httpx
from frontend.endpoints import Json
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

_EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def read_response(body: Json) -> Response:
    """Return a response object, checked."""
    # OpenAI's servers send it; the library has no such field.
    assert body["store"] is False
    response = Response.model_validate({name: value for name, value in body.items() if name != "store"}, strict=True)
    _check_names(response)
    return response


def read_events(response: httpx.Response) -> list[ResponseStreamEvent]:
    """Return the events of a stream, checked: numbered, named and typed."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, end = response.text.split("\n\n")
    assert end == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        fields = json.loads(data.removeprefix("data: "))
        assert (name, fields["sequence_number"]) == (f"event: {fields['type']}", number)
        if "response" in fields:
            read_response(fields["response"])
            del fields["response"]["store"]
        event = _EVENT.validate_python(fields, strict=True)
        _check_names(event)
        events.append(event)
    return events


def _check_names(value: object) -> None:
    """Assert that no object has a field that the library's type lacks."""
    if isinstance(value, BaseModel):
        assert not value.model_extra, f"{type(value).__name__} has {value.model_extra}"
        for _, field in value:
            _check_names(field)
    if isinstance(value, list):
        for element in value:
            _check_names(element)
