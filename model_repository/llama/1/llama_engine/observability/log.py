"""The log: one line per finished request, formatted as text for Triton's log or as JSON for standard error.

A record's `fields` (see `fields_of`) are machine-readable: in text they follow the message as name=value, in JSON they
are members of the object. Client input is escaped: a record is always one line of printable ASCII, and a value can't
imitate another field.

Prompts, and quotations of a request in error messages, are logged only under `log_requests: prompts`; completions are
never logged. Request ids and error messages contain client input, so `RequestLog` limits their length.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from llama_engine.engine.events import Result, finish_reason
from llama_engine.engine.sequence import Sequence
from llama_engine.errors import GenerationError, InvalidRequest, RequestError

ID_CHARACTERS = 128
ERROR_CHARACTERS = 300
PROMPT_CHARACTERS = 2000
"""Maximum characters of a request's prompts in its log line."""

Value = str | int | float | bool | list[str]
Fields = Mapping[str, Value]

Write = Callable[[str], object]

_BARE = re.compile(r"[\w.,:/@+#-]+", re.ASCII)

_log = logging.getLogger(__name__)


class RequestLog:
    """Logs finished requests. level: the setting `log_requests`: none, summary or prompts. Thread-safe."""

    def __init__(self, level: str) -> None:
        self._level = level
        self._numbers = itertools.count(1)

    def name(self, request_id: str) -> str:
        """Return a request's name for the log: its id, escaped and cut, or "#" and a number if the id is empty.

        The name is printable ASCII, at most ID_CHARACTERS long.
        """
        # Cut before escaping, too, because a client can send megabytes.
        escaped = request_id[: ID_CHARACTERS + 1].encode("unicode_escape").decode()
        return _cut(escaped, ID_CHARACTERS) or f"#{next(self._numbers)}"

    def record(self, name: str, sequences: list[Sequence], stream: bool, refusal: RequestError | None) -> None:
        """Log a request whose sequences have all finished. refusal: error of the whole request, else None."""
        if self._level == "none":
            return
        results: list[Result] = [sequence.result for sequence in sequences if sequence.result is not None]
        if refusal is not None:
            results = [refusal]
        # One sequence per prompt: choices share it.
        prompts = [sequence for sequence in sequences if sequence.request.choice == 0]
        fields: dict[str, Value] = {
            "id": name,
            "sequences": len(sequences),
            "stream": stream,
            "finish_reason": ",".join(dict.fromkeys(map(finish_reason, results))),
            "input_tokens": sum(sequence.num_prompt_tokens for sequence in prompts),
            "output_tokens": sum(sequence.num_output_tokens for sequence in sequences),
            **_times(sequences),
        }
        if adapters := dict.fromkeys(each.request.adapter.name for each in prompts if each.request.adapter):
            fields["lora_name"] = ",".join(adapters)
        errors = [result for result in results if isinstance(result, RequestError)]
        if errors:
            fields["error"] = _cut(self._shown(errors[0]), ERROR_CHARACTERS)
        if self._level == "prompts" and prompts:
            share = PROMPT_CHARACTERS // len(prompts)
            fields["prompts"] = [_cut(sequence.request.prompt, share) for sequence in prompts]
        ours = any(isinstance(error, GenerationError) for error in errors)
        _log.log(logging.WARNING if ours else logging.INFO, "request answered", extra={"fields": fields})

    def _shown(self, error: RequestError) -> str:
        """Return an error's message; unless prompts are logged, without quotations of the request."""
        return error.logged if isinstance(error, InvalidRequest) and self._level != "prompts" else str(error)


def fields_of(record: logging.LogRecord) -> Fields:
    """Return the fields of a record that was logged with `log.info(message, extra={"fields": {...}})`."""
    fields: Fields = getattr(record, "fields", {})
    return fields


class TextFormatter(logging.Formatter):
    """Formats a record as its message, its fields as name=value, and the traceback of an exception."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the message and its fields in one line."""
        fields = [f"{name}={_text(value)}" for name, value in fields_of(record).items()]
        return " ".join([super().formatMessage(record), *fields])


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: time (ISO 8601, UTC), level, message, the fields, and `exception` if any."""

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


class TritonLogHandler(logging.Handler):
    """Writes log records to Triton's log, at the nearest of its levels."""

    def __init__(self, info: Write, warning: Write, error: Write) -> None:
        super().__init__()
        self._info, self._warning, self._error = info, warning, error

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        message = f"llama: {self.format(record)}"
        if record.levelno >= logging.ERROR:
            self._error(message)
        elif record.levelno >= logging.WARNING:
            self._warning(message)
        else:
            self._info(message)


def write_json(logger: logging.Logger) -> None:
    """Replace a logger's handlers by one that writes JSON lines to standard error.

    Triton's log is bypassed because it adds a header to each line and quotes the line.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logger.handlers = [handler]


def _times(sequences: list[Sequence]) -> dict[str, Value]:
    """Return the request's times in seconds since its arrival in the model, as log fields.

    queue_seconds: until the last sequence got its slot. first_token_seconds: until the last one got its first token.
    seconds: until the last one finished. A stage that no sequence reached is left out.
    """
    arrived = min((sequence.arrived_at for sequence in sequences), default=math.nan)
    times = {
        "queue_seconds": [sequence.admitted_at for sequence in sequences],
        "first_token_seconds": [sequence.first_token_at for sequence in sequences],
        "seconds": [sequence.finished_at for sequence in sequences],
    }
    reached = {name: [time for time in of_all if not math.isnan(time)] for name, of_all in times.items()}
    return {name: round(max(of_all) - arrived, 6) for name, of_all in reached.items() if of_all}


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: characters - 1] + "~"


def _text(value: Value) -> str:
    if isinstance(value, str):
        return value if _BARE.fullmatch(value) else json.dumps(value)
    # Times in seconds: digits beyond milliseconds are noise.
    return f"{value:.3f}" if isinstance(value, float) else json.dumps(value)
