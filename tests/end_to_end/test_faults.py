"""Faults inside the server fail the sequences concerned with a clear error, and no other ones.

Where in a step a fault can happen, and that it is isolated there, is tested in tests/engine/test_isolation.py.
"""

from __future__ import annotations

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
NEIGHBOUR = {"text_input": "Neighbour", "max_tokens": 12, "min_tokens": 12, "temperature": 1.0, "seed": 3}


@pytest.mark.parametrize(
    ("fault", "message", "logged"),
    [("step", DECODING, SECRET), ("parse", PARSING, "could not be read; its client gets an error")],
)
def test_a_fault_fails_its_own_requests(failing: LocalTriton, fault: str, message: str, logged: str) -> None:
    faulty = NEIGHBOUR | {"text_input": f"Here is a fault {fault} in the middle"}
    alone, metrics = ask(failing, generate, **NEIGHBOUR), Metrics(failing)
    streams = [partial(wire, failing, request) for wire in STREAM_WIRES for request in (faulty, NEIGHBOUR)]
    unary = [partial(wire, failing, faulty) for wire in UNARY_WIRES]
    # Two faulty streams, each beside a neighbour, and a faulty request by each of the wires with one response.
    streamed, refusals = at_once(streams), at_once(unary)
    assert [each.whole for each in streamed[1::2]] == [alone, alone]
    assert {refusal.kind for refusal in refusals if isinstance(refusal, Refusal)} == {"500", "StatusCode.INTERNAL"}
    messages = [refusal.message for refusal in refusals if isinstance(refusal, Refusal)]
    for error in (*messages, *(str(each.error) for each in streamed[::2])):
        assert error.startswith(message)
        assert_clean(error)
    metrics.wait_for(4, "llama_requests_total", finish_reason="error")
    until(lambda: logged in failing.log_text(), lambda: "the log has the cause")


def test_a_model_that_fails_every_step_ends_the_server(failing: LocalTriton) -> None:
    for prompt in ("Here is a fault for good", "Neighbour"):
        refusal = generate(failing, NEIGHBOUR | {"text_input": prompt})
        assert isinstance(refusal, Refusal)
        assert refusal.message.startswith(DECODING)
    assert DECODING in line_of_death(failing)


@pytest.mark.long
def test_a_start_that_the_model_refuses_is_one_line(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    config = repository / "llama" / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 1", "count: 2"))
    server = new_server(environment={"LLAMA_KV_EVENTS": "tcp://127.0.0.1:5557"}, repository=repository)
    reason = r"the model refused to load: llama: .*kv_events needs a model of 1 instance; .*instance_group has 2"
    with pytest.raises(StartFailedError, match=reason) as refusal:
        server.start()
    assert not Path(f"/proc/{server.pid}").exists()
    assert "Traceback" not in server.log_text()
    assert "\n" not in str(refusal.value)
