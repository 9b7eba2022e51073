"""The log's lines about requests that were answered, read back."""

from __future__ import annotations

import re

from server.polling import until
from triton_local.log_lines import parse_line
from triton_local.server import LocalTriton

_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')


def said(server: LocalTriton) -> list[str]:
    """Return the messages of every line about a request."""
    messages = [parse_line(line).message for line in server.log_text().splitlines()]
    return [message for message in messages if message.startswith("llama: request answered ")]


def fields(message: str) -> dict[str, str]:
    """Return the fields of such a message."""
    return dict(_FIELD.findall(message))


def line_of(server: LocalTriton, request_id: str) -> dict[str, str]:
    """Wait for the one line of a request, and return its fields."""

    def its() -> list[str]:
        return [message for message in said(server) if f"id={request_id} " in message]

    # Answers go out before they are noted, and lines take their time through Triton.
    until(lambda: bool(its()), lambda: f"{request_id} is in the log")
    (message,) = its()
    return fields(message)
