"""Faults inside the server fail the sequences concerned with a clear error, and no other ones.

Where in a step a fault can happen, and that it is isolated there, is tested in tests/engine/test_isolation.py.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from end_to_end.metrics import Metrics
from end_to_end.plans import copy_repository
from end_to_end.servers import line_of_death, new_server, until
from end_to_end.streams import STREAM_WIRES
from end_to_end.wires import SECRET, UNARY_WIRES, Refusal, ask, assert_clean, at_once, generate
from triton_local.errors import StartFailedError
from triton_local.server import LocalTriton

DECODING = "INTERNAL: decoding failed; the server's log "
PARSING = "INTERNAL: the request could not be read; the server's log has the reason"
NEIGHBOURS: list[dict[str, object]] = [
    {"text_input": f"Neighbour {index}", "max_tokens": 12, "min_tokens": 12, "temperature": index % 2, "seed": index}
    for index in range(6)
]


@pytest.fixture(scope="module")
def alone(failing: LocalTriton) -> list[str]:
    """What each neighbour gets by itself."""
    return [ask(failing, generate, **request).text for request in NEIGHBOURS]


def _faulty(fault: str) -> list[dict[str, object]]:
    request = {"text_input": f"Here is a fault {fault} in the middle", "max_tokens": 12, "min_tokens": 12}
    return [request | {"seed": seed} for seed in range(3)]


def _outcome(failing: LocalTriton, number: int, request: dict[str, object]) -> str:
    """Return a request's text or error. number: every third is a single response, the others are streams."""
    if number % 3:
        streamed = STREAM_WIRES[number % 2](failing, request)
        return streamed.whole.text if streamed.error is None else streamed.error
    answers = generate(failing, request)
    return answers.message if isinstance(answers, Refusal) else answers[0].text


@pytest.mark.parametrize(
    ("fault", "message", "logged"),
    [("step", DECODING, SECRET), ("parse", PARSING, "could not be read; its client gets an error")],
)
def test_a_fault_fails_its_own_sequences(
    failing: LocalTriton, alone: list[str], fault: str, message: str, logged: str
) -> None:
    requests = [*NEIGHBOURS, *_faulty(fault)]
    metrics = Metrics(failing)
    outcomes = at_once([partial(_outcome, failing, number, request) for number, request in enumerate(requests)])
    assert outcomes[: len(alone)] == alone
    for error in outcomes[len(alone) :]:
        assert error.startswith(message)
        assert_clean(error)
    # Or more, if there was a liveness probe.
    metrics.wait(lambda now: now.reasons().get("length", 0) >= len(alone), "all are counted")
    metrics.wait_for(3, "llama_requests_total", finish_reason="error")
    until(lambda: logged in failing.log_text(), lambda: "the log has the cause")


@pytest.mark.parametrize("fault", ["step", "parse"])
def test_an_internal_error_has_an_internal_status(failing: LocalTriton, fault: str) -> None:
    for wire in UNARY_WIRES:
        refusal = wire(failing, _faulty(fault)[0])
        assert isinstance(refusal, Refusal)
        assert refusal.kind in ("500", "StatusCode.INTERNAL")
        assert_clean(refusal.message)


def test_a_model_that_fails_every_step_ends_the_server(failing: LocalTriton) -> None:
    for request in (_faulty("for good")[0], NEIGHBOURS[0]):
        refusal = generate(failing, request)
        assert isinstance(refusal, Refusal)
        assert refusal.message.startswith(DECODING)
    assert DECODING in line_of_death(failing)


@pytest.mark.long
def test_a_setting_that_the_model_refuses_is_one_line() -> None:
    server = new_server(environment={"LLAMA_NONSENSE": "1"})
    with pytest.raises(StartFailedError) as refusal:
        server.start()
    assert not Path(f"/proc/{server.pid}").exists()
    assert "Traceback" not in server.log_text()
    reason = r"the model refused to load: llama: .*LLAMA_NONSENSE.*unknown setting"
    assert re.search(reason, str(refusal.value))
    assert "\n" not in str(refusal.value)


@pytest.mark.long
def test_kv_events_of_two_instances_are_refused(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    config = repository / "llama" / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 1", "count: 2"))
    server = new_server(environment={"LLAMA_KV_EVENTS": "tcp://127.0.0.1:5557"}, repository=repository)
    with pytest.raises(StartFailedError, match=r"kv_events needs a model of 1 instance; .*instance_group has 2"):
        server.start()
