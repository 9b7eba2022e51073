"""A tritonserver or a model that dies under load: clients get an error, and later requests are answered as before.

Exit codes, and how often a server is started again, are tested with a supervisor of a small tritonserver, and with the
launcher.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from frontend.endpoints import Endpoint
from server.clients import UNARY, model_url
from server.metrics import Metrics, level
from server.openai_endpoint import in_front_of
from server.servers import HTTP, model_process, until
from triton_llama import LlamaClient, LlamaConnectionError, SamplingParams, ServerError
from triton_llama.endpoint import Protocol
from triton_local.server import LocalTriton

LONG = SamplingParams(max_tokens=500, min_tokens=500, temperature=0.0)
# Its own log probabilities show every bit of what was computed.
GOOD = {"text_input": "def", "max_tokens": 24, "temperature": 1.0, "random_seed": 7, "return_log_probs": True}

SLOTS, QUEUED = 2, 4
"""Requests that run at the death, and that wait in the model or in Triton's queue; the endpoint's are among both."""

NOT_HEALTHY = "Stub process 'llama_0_0' is not healthy"
"""Triton's answer to requests in its queue or in the model when it notices a dead process first."""

ENGINE_GONE = '"code":"engine_unavailable"'


@pytest.fixture(scope="module")
def served(healing: LocalTriton) -> Iterator[Endpoint]:
    """An OpenAI endpoint that outlives the servers behind it, and resumes nothing."""
    with in_front_of(healing, resume_timeout=0) as endpoint:
        yield endpoint


def _kill_server(server: LocalTriton) -> str:
    os.kill(server.pid, signal.SIGSEGV)
    return "tritonserver died of SIGSEGV"


def _send_an_impossible_shape(server: LocalTriton) -> str:
    """Triton 2.51 allocates what the shape says, and dies."""
    tensors = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["def"]},
        {"name": "max_tokens", "datatype": "INT32", "shape": [4611686018427387904], "data": [1]},
    ]
    with pytest.raises(httpx.RemoteProtocolError):
        HTTP.post(f"http://{server.http_url}/v2/models/llama_unary/infer", json={"inputs": tensors})
    return "tritonserver died of SIGSEGV"


def _kill_model(server: LocalTriton, model: str) -> str:
    pid = model_process(server, model).pid
    os.kill(pid, signal.SIGKILL)
    return f"the model process {pid} is gone"


def _stop_model(server: LocalTriton) -> str:
    os.kill(model_process(server).pid, signal.SIGSTOP)
    return "the model is dead: requests wait, the last step was "


DEATHS: dict[str, Callable[[LocalTriton], str]] = {
    "tritonserver": _kill_server,
    "the model": lambda server: _kill_model(server, "llama"),
    "llama_unary": lambda server: _kill_model(server, UNARY),
    "an impossible shape": _send_an_impossible_shape,
    "a stuck model": _stop_model,
}
"""Each returns how the log's one line about it begins."""

IN_MAKE_TEST = ("the model",)


def _computed(server: LocalTriton) -> dict[str, Any]:
    """Return the whole answer to a request whose bits depend on nothing else."""
    answer: dict[str, Any] = HTTP.post(model_url(server, "generate"), json=GOOD).raise_for_status().json()
    return answer


def _clients(server: LocalTriton, endpoint: Endpoint) -> list[Callable[[], None]]:
    """Return requests over every way to the model; each checks how it fails."""

    def direct(protocol: Protocol, streams: bool) -> None:
        url = server.http_url if protocol == "http" else server.grpc_url
        with LlamaClient(url, protocol) as client, pytest.raises((LlamaConnectionError, ServerError)) as failed:
            list(client.stream("def", LONG)) if streams else client.generate("def", LONG)
        assert isinstance(failed.value, LlamaConnectionError) or NOT_HEALTHY in str(failed.value)

    def openai(streams: bool) -> None:
        answer = endpoint.complete(max_tokens=500, min_tokens=500, stream=streams)
        if ENGINE_GONE in answer.text:
            # A stream that has begun has its status.
            assert streams or answer.status_code == 503
        else:
            assert NOT_HEALTHY in answer.text

    return [
        lambda: openai(streams=False),
        lambda: openai(streams=True),
        lambda: direct("http", streams=False),
        lambda: direct("http", streams=True),
        lambda: direct("grpc", streams=False),
        lambda: direct("grpc", streams=True),
    ]


def _is_up(server: LocalTriton) -> bool:
    assert server.exit_code is None, server.log_text()
    try:
        return HTTP.get(model_url(server, "ready")).is_success
    except httpx.TransportError:
        return False


def _answers(endpoint: Endpoint) -> bool:
    """Return whether the endpoint answers; a refusal must say that the server is away."""
    status = endpoint.complete(max_tokens=5).status_code
    assert status in (200, 503)
    return status == 200


def _own_lines(server: LocalTriton) -> list[str]:
    return [line for line in server.log_text().splitlines() if line.startswith("triton_supervisor: ")]


@pytest.mark.parametrize(
    "die",
    [pytest.param(die, id=name, marks=[pytest.mark.long] * (name not in IN_MAKE_TEST)) for name, die in DEATHS.items()],
)
def test_requests_under_way_fail_and_later_ones_have_the_bits_of_before(
    healing: LocalTriton, served: Endpoint, die: Callable[[LocalTriton], str]
) -> None:
    expected, lines, restarts = _computed(healing), _own_lines(healing), level(healing, "llama_server_restarts")
    pid, urls = healing.pid, healing.urls
    regions = re.findall(r"/dev/shm/triton_python_backend_shm_region_\S+", Path(f"/proc/{pid}/maps").read_text())
    assert regions
    with ThreadPoolExecutor() as pool:
        metrics = Metrics(healing)
        failures = [pool.submit(client) for client in _clients(healing, served)]
        metrics.wait_for_slots(SLOTS, waiting=QUEUED)
        begins = die(healing)
        for failure in failures:
            failure.result()
    until(lambda: _answers(served), lambda: "the endpoint has connected again")
    until(lambda: _is_up(healing), lambda: "it serves again")
    assert (healing.pid != pid, healing.urls) == (True, urls)
    assert not any(Path(region).exists() for region in regions)
    assert level(healing, "llama_server_restarts") == restarts + 1
    (line,) = _own_lines(healing)[len(lines) :]
    assert line.startswith(f"triton_supervisor: {begins}")
    assert "; tritonserver is started again " in line
    assert _computed(healing) == expected
    with LlamaClient(healing.grpc_url, "grpc") as client:
        assert client.generate("def", max_tokens=5, min_tokens=5, temperature=0).num_output_tokens == 5
