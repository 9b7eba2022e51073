"""The request log: what a line holds, what is never logged, and that nothing a client wrote leaves its field."""

import json
import logging
import math
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from engine.metrics import finished_sequence
from llama_engine.engine.events import Completion
from llama_engine.engine.sequence import Sequence
from llama_engine.errors import Cancelled, GenerationError, InvalidRequest, RequestError
from llama_engine.observability.log import (
    ERROR_CHARACTERS,
    ID_CHARACTERS,
    PROMPT_CHARACTERS,
    Fields,
    JsonFormatter,
    RequestLog,
    TextFormatter,
    TritonLogHandler,
    fields_of,
)

PROMPT = "a secret prompt"
STOPPED = Completion("a secret completion", "stop", 3, 2)
HOSTILE = [
    "two\nlines", "\x1b[31mcolour\x7f", 'a" id=other sequences="99', "a sequences=99", "\u2028\x85\u202e", "\udce4", "",
]  # fmt: skip


def _sequence(prompt: str = PROMPT) -> Sequence:
    return finished_sequence(STOPPED, prompt, tokens=2, admitted_at=10.5, first_token_at=11.25)


def _logged(
    caplog: pytest.LogCaptureFixture, level: str, *sequences: Sequence, refusal: RequestError | None = None
) -> dict[str, object]:
    """Record a request; return the fields of its line."""
    caplog.clear()
    caplog.set_level(logging.DEBUG, "llama_engine")
    RequestLog("none").record("job-7", list(sequences), False, refusal)
    RequestLog(level).record("job-7", list(sequences), False, refusal)
    (record,) = caplog.records
    return dict(fields_of(record))


def test_the_sequences_of_a_request_share_a_line(caplog: pytest.LogCaptureFixture) -> None:
    late = finished_sequence(Completion("", "length", 3, 4), tokens=4, admitted_at=13.0, first_token_at=14.0)
    fields = _logged(caplog, "summary", _sequence(), late, _sequence())
    assert (fields["sequences"], fields["input_tokens"], fields["output_tokens"]) == (3, 9, 8)
    assert fields["finish_reason"] == "stop,length"
    assert (fields["queue_seconds"], fields["first_token_seconds"], fields["seconds"]) == (3.0, 4.0, 10.0)


def test_prompts_are_logged_only_on_request(caplog: pytest.LogCaptureFixture) -> None:
    assert "secret" not in str(_logged(caplog, "summary", _sequence()))
    choices = [_sequence(), _sequence(), _sequence("another")]
    choices[1].request = replace(choices[1].request, n=2, choice=1)
    fields = _logged(caplog, "prompts", *choices)
    assert (fields["sequences"], fields["input_tokens"], fields["output_tokens"]) == (3, 6, 6)
    assert fields["prompts"] == [PROMPT, "another"]
    assert "completion" not in str(fields)


@pytest.mark.parametrize(("level", "logged"), [("summary", "stop_words is ...; it must be short"), ("prompts", "")])
def test_what_an_error_quotes_is_logged_only_where_prompts_are(
    caplog: pytest.LogCaptureFixture, level: str, logged: str
) -> None:
    error = InvalidRequest("stop_words is ", "'a secret'", "; it must be short")
    assert str(error) == "stop_words is 'a secret'; it must be short"
    assert _logged(caplog, level, refusal=error) == {
        "id": "job-7", "sequences": 0, "stream": False, "finish_reason": "invalid", "input_tokens": 0,
        "output_tokens": 0, "error": logged or str(error),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "reason", "level"),
    [
        (Cancelled("gone"), "cancelled", logging.INFO),
        (GenerationError("ours"), "error", logging.WARNING),
    ],
)
def test_a_failed_sequence_is_logged_without_the_times_it_never_reached(
    caplog: pytest.LogCaptureFixture, error: RequestError, reason: str, level: int
) -> None:
    fields = _logged(caplog, "summary", finished_sequence(error, admitted_at=math.nan, first_token_at=math.nan))
    assert (fields["finish_reason"], fields["error"], fields["seconds"]) == (reason, str(error), 10.0)
    assert {"queue_seconds", "first_token_seconds"} & fields.keys() == set()
    assert caplog.records[0].levelno == level


def test_long_values_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    sequences = [finished_sequence(GenerationError("e" * 5000), "p" * 50_000)] * 32
    fields = _logged(caplog, "prompts", *sequences)
    assert len(str(fields["error"])) == ERROR_CHARACTERS
    prompts = fields["prompts"]
    assert isinstance(prompts, list)
    assert len(prompts) == 32
    assert sum(map(len, prompts)) <= PROMPT_CHARACTERS


@pytest.mark.parametrize(
    ("request_id", "name"),
    [
        ("a\nb\x1b[31m\x7f ä\u2028\udce4", "a\\nb\\x1b[31m\\x7f \\xe4\\u2028\\udce4"),
        ("x" * ID_CHARACTERS, "x" * ID_CHARACTERS),
        ("\n" * 1_000_000, "\\n" * (ID_CHARACTERS // 2 - 1) + "\\~"),
    ],
)
def test_a_request_is_named_by_its_id_or_a_number(request_id: str, name: str) -> None:
    log = RequestLog("summary")
    assert [log.name(client_id) for client_id in ("", request_id, "", request_id)] == ["#1", name, "#2", name]


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


def test_log_records_are_written_at_tritons_nearest_level() -> None:
    lines: list[str] = []
    log = logging.Logger("a logger of its own")
    log.addHandler(TritonLogHandler(*(lambda line, level=level: lines.append(f"{level} {line}") for level in "IWE")))
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        log.log(level, "%s", level)
    assert lines == ["I llama: 10", "I llama: 20", "W llama: 30", "E llama: 40", "E llama: 50"]
