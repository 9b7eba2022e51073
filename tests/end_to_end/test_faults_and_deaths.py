"""A fault fails the sequences concerned and no other ones; a model that dies ends the server with 70 and its reason.

Where in a step a fault can happen, and that it is isolated there, is tested in tests/engine/test_isolation.py; other
deaths in tests/deploy, with a stand-in for tritonserver or for the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from end_to_end.metrics import Metrics
from end_to_end.plans import copy_repository, planned
from end_to_end.servers import in_front_of, line_of_death, model_process, new_server, until
from end_to_end.streams import STREAM_WIRES
from end_to_end.wires import SECRET, UNARY_WIRES, Refusal, ask, assert_clean, at_once, generate
from engine.families import save_base_model, save_family
from frontend.endpoints import Endpoint, resumptions_of
from triton_llama import LlamaClient, LlamaConnectionError, SamplingParams, ServerError
from triton_llama.address import Protocol
from triton_local.errors import StartFailedError
from triton_local.server import LocalTriton
from triton_supervisor.health import Limits, healthy
from triton_supervisor.triton import Address

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


LONG = SamplingParams(max_tokens=1500, min_tokens=1500, temperature=2.0)
"""Nothing of this text repeats, so that drafts don't shorten it."""

SLOTS, QUEUED = 2, 3
"""Requests that run at the death, and that wait in the model or in Triton's queue; the endpoint's are among both."""

NOT_HEALTHY = "Stub process 'llama_0_0' is not healthy"
"""Triton's answer to requests in its queue or in the model when it notices a dead process first."""


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[LocalTriton]:
    """A server for one death."""
    with planned("mortal", tmp_path) as server:
        yield server


@pytest.fixture
def served(mortal: LocalTriton) -> Iterator[Endpoint]:
    """An OpenAI endpoint that resumes nothing."""
    with in_front_of(mortal, resume_timeout=0) as endpoint:
        yield endpoint


def _kill(server: LocalTriton) -> str:
    """Kill the model; return how the log's one line about it begins."""
    process = model_process(server)
    process.kill()
    return f"the model process {process.pid} is gone"


def _stop(server: LocalTriton) -> str:
    """Have the model make no step; return how the log's one line about it begins."""
    model_process(server).suspend()
    return "the model is dead: "


def _clients(server: LocalTriton, endpoint: Endpoint) -> list[Callable[[], None]]:
    """Return requests over every way to the model; each checks how it fails."""

    def direct(protocol: Protocol, streams: bool) -> None:
        address = server.http_address if protocol == "http" else server.grpc_address
        with LlamaClient(address, protocol) as client, pytest.raises((LlamaConnectionError, ServerError)) as failed:
            list(client.stream("def", LONG)) if streams else client.generate("def", LONG)
        assert isinstance(failed.value, LlamaConnectionError) or NOT_HEALTHY in str(failed.value)

    def openai() -> None:
        answer = endpoint.complete(max_tokens=1500, min_tokens=1500, temperature=2, stream=True)
        assert '"code":"engine_unavailable"' in answer.text or NOT_HEALTHY in answer.text

    return [
        openai,
        lambda: direct("http", streams=False),
        lambda: direct("http", streams=True),
        lambda: direct("grpc", streams=False),
        lambda: direct("grpc", streams=True),
    ]


@pytest.mark.parametrize("die", [_kill, pytest.param(_stop, marks=pytest.mark.long)])
def test_a_death_fails_requests_under_way_and_ends_the_server_with_70(
    mortal: LocalTriton, served: Endpoint, die: Callable[[LocalTriton], str]
) -> None:
    with ThreadPoolExecutor() as pool:
        metrics = Metrics(mortal)
        failures = [pool.submit(client) for client in _clients(mortal, served)]
        metrics.wait_for_slots(SLOTS, waiting=QUEUED)
        begins = die(mortal)
        assert line_of_death(mortal).startswith(begins)
        for failure in failures:
            failure.result()


@pytest.mark.long
def test_a_stream_that_is_silent_for_long_is_not_interrupted() -> None:
    """On a server of its own: to any other request Triton would find the model dead meanwhile."""
    body = {"prompt": "def", "max_tokens": 1500, "min_tokens": 1500, "temperature": 2, "stream": True}
    with (
        new_server("streaming") as server,
        in_front_of(server) as served,
        served.http.stream("POST", "/v1/completions", json=body, timeout=90) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        process = model_process(server)
        process.suspend()
        # Without the supervisor's option Triton ends the connection after 30 s: too_many_pings.
        time.sleep(45)
        process.resume()
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert resumptions_of(served) == {}


@pytest.mark.long
def test_an_idle_model_without_a_head_lives_past_its_stuck_time(tmp_path: Path) -> None:
    model = save_base_model(tmp_path / "base", save_family(tmp_path / "mistral", "mistral"))
    settings = {"LLAMA_MODEL": str(model), "LLAMA_POOLING": "mean", "TRITON_STUCK_SECONDS": "12"}
    with new_server("streaming", settings) as server:
        metrics = Metrics(server)

        def embeddings() -> float:
            assert server.exit_code is None, server.log_text()
            return metrics.grown("llama_requests_total", finish_reason="stop")

        # The supervisor asks for one only once the last step is a quarter of that time ago.
        until(lambda: embeddings() > 5, lambda: "the supervisor's probes")
        verdict = healthy(Address.parse(server.http_address), None, Limits(timeout=60.0))
    assert verdict.ok, verdict
    assert verdict.reason.startswith("one embedding in ")
