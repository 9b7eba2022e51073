"""Log lines in text and in JSON; nothing that a client wrote leaves its field."""

import json
import logging
from datetime import UTC, datetime

import pytest
from llama_engine.observability.log import Fields, JsonFormatter, TextFormatter

HOSTILE = [
    "two\nlines",
    "tab\tand\x1b[31mcolour",
    'a" id=other finish_reason="stop',
    "a sequences=99",
    "paragraph\u2029separator\u2028and\x85next line",
    "right-to-left \u202eoverride",
    "\udce4 lone surrogate",
    "del\x7f",
    "",
]


def _record(fields: Fields | None = None, error: Exception | None = None) -> logging.LogRecord:
    raised = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "request answered", None, raised)
    if fields is not None:
        record.__dict__["fields"] = fields
    return record


def test_the_format_of_a_line() -> None:
    assert TextFormatter().format(_record()) == "request answered"
    fields: Fields = {
        "id": "job/7:a.b@c,d#1+2-3", "sequences": 2, "stream": False, "seconds": 1.23456, "error": "top_p is 2",
        "prompts": ["ä b", "c"],
    }  # fmt: skip
    record = _record(fields)
    assert TextFormatter().format(record) == (
        "request answered id=job/7:a.b@c,d#1+2-3 sequences=2 stream=false seconds=1.235 "
        r'error="top_p is 2" prompts=["\u00e4 b", "c"]'
    )
    line = json.loads(JsonFormatter().format(record))
    time = datetime.fromisoformat(line.pop("time"))
    assert time.utcoffset() == UTC.utcoffset(None)
    assert abs(time.timestamp() - record.created) < 0.002
    assert line == {"level": "INFO", "message": "request answered", **fields}


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_client_wrote_stays_in_its_field(text: str) -> None:
    start, record = "request answered id=", _record({"id": text, "sequences": 1})
    line = TextFormatter().format(record)
    assert line.isascii()
    assert line.isprintable()
    assert line.startswith(start)
    written, end = json.JSONDecoder().raw_decode(line.removeprefix(start))
    assert written == text
    assert line.removeprefix(start)[end:] == " sequences=1"
    whole = JsonFormatter().format(record)
    assert whole.isascii()
    assert "\n" not in whole
    assert json.loads(whole)["id"] == text


def test_an_exception_follows_the_fields() -> None:
    record = _record({"id": "a"}, ValueError("broken"))
    first, *others = TextFormatter().format(record).splitlines()
    assert first == "request answered id=a"
    assert others[-1] == "ValueError: broken"
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["id"]) == ("request answered", "a")
    assert line["exception"].splitlines()[-1] == "ValueError: broken"
