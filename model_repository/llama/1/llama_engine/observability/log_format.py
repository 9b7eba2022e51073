"""Log lines: text for Triton's log, or JSON lines.

A record's `fields` (see `fields_of`) are for programs to parse: in text they follow the message as name=value, in JSON
they are members of the object. Whatever a client wrote, a line is one line of printable ASCII, and a value can't pass
for another field.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

Value = str | int | float | bool | list[str]
Fields = Mapping[str, Value]

_BARE = re.compile(r"[\w.,:/@+#-]+", re.ASCII)


def fields_of(record: logging.LogRecord) -> Fields:
    """Return the fields of a record, logged as `log.info(message, extra={"fields": {...}})`."""
    fields: Fields = getattr(record, "fields", {})
    return fields


class TextFormatter(logging.Formatter):
    """The message, its fields, and the exception if there is one."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the message and its fields in one line."""
        fields = [f"{name}={_text(value)}" for name, value in fields_of(record).items()]
        return " ".join([super().formatMessage(record), *fields])


class JsonFormatter(logging.Formatter):
    """One object: time (ISO 8601, UTC), level, message, the fields, and `exception` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object in one line."""
        line: dict[str, Value] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def write_json(logger: logging.Logger) -> None:
    """Make a logger write JSON lines to standard error, and only there.

    It bypasses Triton's log, which would put a header before each line and quotes around it.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logger.handlers = [handler]


def _text(value: Value) -> str:
    if isinstance(value, str):
        return value if _BARE.fullmatch(value) else json.dumps(value)
    # Times in seconds: digits beyond milliseconds are noise.
    return f"{value:.3f}" if isinstance(value, float) else json.dumps(value)
