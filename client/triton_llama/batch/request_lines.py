"""The lines of a batch: OpenAI's, one JSON object each.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

The endpoint checks the bodies; what is checked here can't be sent, or its answer couldn't be told from another one's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from triton_llama.errors import RejectedInputError

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MAX_LINE_BYTES = 2**24
_FIELDS = {"custom_id": str, "method": str, "url": str, "body": dict}
_SHOWN = 80
"""Characters of a refused value in its message."""


@dataclass(frozen=True)
class BatchRequest:
    """A line of a batch."""

    custom_id: str
    url: str
    """The path at the endpoint, one of `PATHS`."""
    body: dict[str, object]


def read_custom_ids(path: Path) -> set[str]:
    """Check every line of a batch; return the custom_ids. Raises RejectedInputError."""
    custom_ids: set[str] = set()
    for number, request in read_lines(path):
        if request.custom_id in custom_ids:
            _refuse(f"{path}:{number}", "custom_id", request.custom_id, "unique in the file")
        custom_ids.add(request.custom_id)
    return custom_ids


def read_lines(path: Path) -> Iterator[tuple[int, BatchRequest]]:
    """Yield the number and the request of each line that isn't blank. Raises RejectedInputError at a malformed one."""
    with path.open("rb") as file:
        for number in count(1):
            if not (line := file.readline(MAX_LINE_BYTES + 1)):
                return
            if len(line) > MAX_LINE_BYTES:
                raise RejectedInputError(f"{path}:{number} is longer than {MAX_LINE_BYTES} bytes")
            if not line.isspace():
                yield number, _parse(line, f"{path}:{number}")


def _parse(line: bytes, place: str) -> BatchRequest:
    fields = parse_object(line, place)
    for name, kind in _FIELDS.items():
        if not isinstance(fields.get(name), kind) or not fields[name]:
            _refuse(place, name, fields.get(name), f"{'an object' if kind is dict else 'text'}, not empty")
    if fields["method"] != "POST":
        _refuse(place, "method", fields["method"], "POST")
    if fields["url"] not in PATHS:
        _refuse(place, "url", fields["url"], f"one of {', '.join(PATHS)}")
    if (stream := fields["body"].get("stream")) not in (None, False):
        _refuse(place, "body.stream", stream, "false: the answers of a batch come whole")
    return BatchRequest(fields["custom_id"], fields["url"], fields["body"])


def parse_object(line: bytes, place: str) -> dict[str, Any]:
    """Parse a JSON object. place: for the message. Raises RejectedInputError."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RejectedInputError(f"{place} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        _refuse(place, "the line", fields, "an object")
    return fields


def _refuse(place: str, field: str, value: object, bound: str) -> NoReturn:
    text = repr(value)
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    raise RejectedInputError(f"{place}: {field} is {text}; it must be {bound}")
