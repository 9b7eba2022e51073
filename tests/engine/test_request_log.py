"""What is logged of a request that was answered, of whom nothing is, and what an id of a client's may look like."""

import logging
import math

import pytest
from engine.scheduling import Answers
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.errors import Cancelled, GenerationError, InvalidRequest, RequestError, Unavailable
from llama_engine.observability.log_format import Fields, fields_of
from llama_engine.observability.request_log import ERROR_CHARACTERS, ID_CHARACTERS, PROMPT_CHARACTERS, RequestLog
from llama_engine.sequence import Completion, Result, Sequence, names_of
from llama_engine.text.stop_checker import StopChecker
from llama_engine.tickets import Ticket

PROMPT = "a secret prompt"
STOPPED = Completion("a secret completion", "stop", 3, 2)


def _ticket(outcome: Result, prompt: str = PROMPT, tokens: int = 2, **times: float) -> Ticket:
    request = GenerationRequest(prompt=prompt, prompt_tokens=(1, 2, 3), max_tokens=9)
    transcript = StopChecker(min_tokens=0, max_tokens=9, stop_words=[], end_tokens=[])
    for token in range(tokens):
        transcript.add(token, b"x")
    moments = {"arrived": 10.0, "entered": 10.5, "started": 11.25, "ended": 12.0} | times
    return Ticket(Sequence(request, transcript, None), Answers(), outcome=outcome, **moments)  # type: ignore[arg-type]


def _line(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    (record,) = caplog.records
    return record


def _fields(caplog: pytest.LogCaptureFixture) -> Fields:
    return fields_of(_line(caplog))


@pytest.fixture(autouse=True)
def _everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "llama_engine")


def test_a_request_alone_is_noted_wrong(caplog: pytest.LogCaptureFixture) -> None:
    RequestLog("summary").answered("job-7", [_ticket(STOPPED)], True, None)
    assert _fields(caplog) == {
        "id": "job-7",
        "rows": 1,
        "stream": True,
        "finish_reason": "stop",
        "input_tokens": 3,
        "output_tokens": 2,
        "queue_seconds": 0.5,
        "first_token_seconds": 1.25,
        "seconds": 2.0,
    }
    assert (_line(caplog).levelno, _line(caplog).getMessage()) == (logging.INFO, "request answered")


def test_rows_of_one_request_are_several_lines_or_their_times_are_one_rows(caplog: pytest.LogCaptureFixture) -> None:
    late = _ticket(Completion("", "length", 3, 4), tokens=4, entered=13.0, started=14.0, ended=15.0)
    RequestLog("summary").answered("a", [_ticket(STOPPED), late, _ticket(STOPPED)], False, None)
    fields = _fields(caplog)
    assert (fields["rows"], fields["input_tokens"], fields["output_tokens"]) == (3, 9, 8)
    assert fields["finish_reason"] == "stop,length"
    assert (fields["queue_seconds"], fields["first_token_seconds"], fields["seconds"]) == (3.0, 4.0, 5.0)


def test_a_request_that_never_became_rows_is_not_noted(caplog: pytest.LogCaptureFixture) -> None:
    RequestLog("prompts").answered("a", [], False, InvalidRequest("top_p is 2; it must be at most 1"))
    assert _fields(caplog) == {
        "id": "a",
        "rows": 0,
        "stream": False,
        "finish_reason": "invalid",
        "input_tokens": 0,
        "output_tokens": 0,
        "error": "top_p is 2; it must be at most 1",
    }


@pytest.mark.parametrize(
    ("error", "reason", "level"),
    [
        (Cancelled("gone"), "cancelled", logging.INFO),
        (Unavailable("late"), "unavailable", logging.INFO),
        (GenerationError("ours"), "error", logging.WARNING),
    ],
)
def test_a_row_that_failed_looks_like_one_that_did_not(
    caplog: pytest.LogCaptureFixture, error: RequestError, reason: str, level: int
) -> None:
    never = _ticket(error, tokens=0, entered=math.nan, started=math.nan)
    RequestLog("summary").answered("a", [never], False, None)
    fields = _fields(caplog)
    assert (fields["finish_reason"], fields["error"], fields["seconds"]) == (reason, str(error), 2.0)
    assert {"queue_seconds", "first_token_seconds"} & fields.keys() == set()
    assert _line(caplog).levelno == level


def test_prompts_are_logged_unasked_or_not_logged_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    RequestLog("none").answered("a", [_ticket(STOPPED)], False, None)
    assert caplog.records == []
    RequestLog("summary").answered("a", [_ticket(STOPPED)], False, None)
    assert "secret" not in str(_fields(caplog))
    caplog.clear()
    RequestLog("prompts").answered("a", [_ticket(STOPPED), _ticket(STOPPED, "another")], False, None)
    assert _fields(caplog)["prompts"] == [PROMPT, "another"]
    assert "completion" not in str(_fields(caplog))


def test_a_long_prompt_or_error_makes_a_long_line(caplog: pytest.LogCaptureFixture) -> None:
    rows = [_ticket(GenerationError("e" * 5000), "p" * 50_000) for _ in range(32)]
    RequestLog("prompts").answered("a", rows, False, None)
    fields = _fields(caplog)
    assert len(str(fields["error"])) == ERROR_CHARACTERS
    prompts = fields["prompts"]
    assert isinstance(prompts, list)
    assert len(prompts) == 32
    assert sum(map(len, prompts)) <= PROMPT_CHARACTERS


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("job-7", "job-7"),
        ("a b", "a b"),
        ("a\nb\x1b[31m\x7f", "a\\nb\\x1b[31m\\x7f"),
        ("ä\u2028\u202e", "\\xe4\\u2028\\u202e"),
        ("\udce4", "\\udce4"),
        ("x" * ID_CHARACTERS, "x" * ID_CHARACTERS),
        ("x" * (ID_CHARACTERS + 1), "x" * (ID_CHARACTERS - 1) + "~"),
        ("\n" * 1_000_000, "\\n" * (ID_CHARACTERS // 2 - 1) + "\\~"),
    ],
)
def test_an_id_gets_into_the_log_as_it_came(given: str, name: str) -> None:
    assert RequestLog("summary").name(given) == name


def test_requests_without_an_id_have_the_same_name() -> None:
    log = RequestLog("summary")
    assert [log.name(given) for given in ("", "a", "", "a")] == ["#1", "a", "#2", "a"]


def test_a_row_alone_is_not_called_by_its_request() -> None:
    row = _ticket(STOPPED).row
    assert names_of([row]) == "1 rows"
    row.name = "job-7"
    assert names_of([row]) == "request job-7"
    assert names_of([row, row]) == "2 rows"
