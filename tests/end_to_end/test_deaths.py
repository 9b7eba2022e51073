"""A model that dies under load: clients get an error, and the server ends with 70 and its reason.

Other deaths are tested in tests/deploy, with a stand-in for tritonserver or for the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from end_to_end.metrics import Metrics
from end_to_end.openai_endpoint import in_front_of
from end_to_end.plans import planned
from end_to_end.servers import line_of_death, model_process, new_server
from frontend.endpoints import Endpoint, resumptions_of
from triton_llama import LlamaClient, LlamaConnectionError, SamplingParams, ServerError
from triton_llama.address import Protocol
from triton_local.server import LocalTriton

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
