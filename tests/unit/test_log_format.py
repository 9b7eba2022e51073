"""Log lines in text and in JSON; nothing that a client wrote leaves its field."""

import io
import json
import logging
import sys
from datetime import UTC, datetime

import pytest
from llama_engine.observability.log import Fields, JsonFormatter, TextFormatter, write_json

HOSTILE = [
    "two\nlines",
    "tab\tand\x1b[31mcolour",
    'a" id=other finish_reason="stop',
    "a rows=99",
    "paragraph\u2029separator\u2028and\x85next line",
    "right-to-left \u202eoverride",
    "\udce4 lone surrogate",
    "del\x7f",
    "",
]


def _record(message: str = "request answered", fields: Fields | None = None) -> logging.LogRecord:
    record = logging.LogRecord("llama_engine.x", logging.INFO, __file__, 1, message, None, None)
    if fields is not None:
        record.__dict__["fields"] = fields
    return record


def test_a_text_line_is_the_message_and_its_fields() -> None:
    assert TextFormatter().format(_record("settings: a=b")) == "settings: a=b"
    fields: Fields = {
        "id": "job/7:a.b@c,d#1+2-3",
        "rows": 2,
        "stream": False,
        "seconds": 1.23456,
        "error": "top_p is 2",
        "prompts": ["a b", "c"],
    }
    assert TextFormatter().format(_record(fields=fields)) == (
        "request answered id=job/7:a.b@c,d#1+2-3 rows=2 stream=false seconds=1.235 "
        'error="top_p is 2" prompts=["a b", "c"]'
    )


def test_a_json_line_is_an_object_of_time_level_message_and_fields() -> None:
    record = _record(fields={"id": "a", "rows": 2, "seconds": 0.25, "stream": True, "prompts": ["ä"]})
    line = json.loads(JsonFormatter().format(record))
    time = datetime.fromisoformat(line.pop("time"))
    assert time.utcoffset() == UTC.utcoffset(None)
    assert abs(time.timestamp() - record.created) < 0.002
    assert line == {
        "level": "INFO",
        "message": "request answered",
        "id": "a",
        "rows": 2,
        "seconds": 0.25,
        "stream": True,
        "prompts": ["ä"],
    }


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_client_wrote_stays_in_its_line_and_field(text: str) -> None:
    fields: Fields = {"id": text, "rows": 1}
    line = TextFormatter().format(_record(fields=fields))
    assert line.isascii()
    assert line.isprintable()
    start = "request answered id="
    assert line.startswith(start)
    written, end = json.JSONDecoder().raw_decode(line.removeprefix(start))
    assert written == text
    assert line.removeprefix(start)[end:] == " rows=1"
    whole = JsonFormatter().format(_record(fields=fields))
    assert whole.isascii()
    assert "\n" not in whole
    assert json.loads(whole)["id"] == text


def test_an_exception_follows_the_fields() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "it failed", None, sys.exc_info())
    record.__dict__["fields"] = {"id": "a"}
    first, *others = TextFormatter().format(record).splitlines()
    assert first == "it failed id=a"
    assert others[-1] == "ValueError: broken"
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["level"], line["id"]) == ("it failed", "ERROR", "a")
    assert line["exception"].splitlines()[-1] == "ValueError: broken"


def test_json_lines_go_to_standard_error_only(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.Logger("llama_engine")
    before = io.StringIO()
    logger.addHandler(logging.StreamHandler(before))
    write_json(logger)
    logger.info("one")
    logger.warning("two", extra={"fields": {"id": "a\nb"}})
    written = capfd.readouterr().err.splitlines()
    assert [json.loads(line)["message"] for line in written] == ["one", "two"]
    assert before.getvalue() == ""
