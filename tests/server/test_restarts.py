"""A tritonserver that dies under load: every client gets an error, and later requests are answered as before."""

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
from server.clients import model_url
from server.metrics import Metrics, level
from server.openai_endpoint import in_front_of
from server.servers import HTTP, is_decoupled, until
from triton_llama import LlamaClient, LlamaConnectionError, SamplingParams
from triton_llama.endpoint import Protocol
from triton_local.server import LocalTriton

LONG = SamplingParams(max_tokens=500, min_tokens=500, temperature=0.0)
# Its own log probabilities show every bit of what was computed.
GOOD = {"text_input": "def", "max_tokens": 24, "temperature": 1.0, "random_seed": 7, "return_log_probs": True}
LINE = (
    "triton_local: tritonserver died of SIGSEGV (the last request's route is unknown: "
    "tritonserver logs it with --log-verbose=1 only); tritonserver is started again "
)
ENGINE_GONE = '"code":"engine_unavailable"'


@pytest.fixture(scope="module")
def served(healing: LocalTriton) -> Iterator[Endpoint]:
    """An OpenAI endpoint that outlives the servers behind it."""
    with in_front_of(healing) as endpoint:
        yield endpoint


def _kill(server: LocalTriton) -> None:
    os.kill(server.pid, signal.SIGSEGV)


def _send_an_impossible_shape(server: LocalTriton) -> None:
    """Triton 2.51 allocates what the shape says, and dies."""
    tensors = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["def"]},
        {"name": "max_tokens", "datatype": "INT32", "shape": [4611686018427387904], "data": [1]},
    ]
    with pytest.raises(httpx.RemoteProtocolError):
        HTTP.post(f"http://{server.http_url}/v2/models/llama_unary/infer", json={"inputs": tensors})


def _computed(server: LocalTriton) -> dict[str, Any]:
    """Return the whole answer to a request whose bits depend on nothing else."""
    answer: dict[str, Any] = HTTP.post(model_url(server, "generate"), json=GOOD).raise_for_status().json()
    return answer


def _clients(server: LocalTriton, endpoint: Endpoint) -> list[Callable[[], str]]:
    """Return requests over every way to the model; each returns how it failed."""

    def direct(protocol: Protocol, streams: bool) -> str:
        url = server.http_url if protocol == "http" else server.grpc_url
        with LlamaClient(url, protocol) as client, pytest.raises(LlamaConnectionError) as failed:
            list(client.stream("def", LONG)) if streams else client.generate("def", LONG)
        return str(failed.value)

    def openai(streams: bool) -> str:
        answer = endpoint.complete(max_tokens=500, min_tokens=500, stream=streams)
        return answer.text.split("\n\n")[-2] if streams else f"{answer.status_code} {answer.text}"

    return [
        lambda: direct("http", streams=False),
        lambda: direct("http", streams=True),
        lambda: direct("grpc", streams=False),
        lambda: direct("grpc", streams=True),
        lambda: openai(streams=False),
        lambda: openai(streams=True),
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
    return [line for line in server.log_text().splitlines() if line.startswith("triton_local: ")]


@pytest.mark.parametrize("die", [_kill, pytest.param(_send_an_impossible_shape, marks=pytest.mark.long)])
def test_requests_under_way_fail_with_a_connection_error_and_later_ones_have_the_bits_of_before(
    healing: LocalTriton, served: Endpoint, die: Callable[[LocalTriton], None]
) -> None:
    assert is_decoupled(healing)
    expected, lines, restarts = _computed(healing), _own_lines(healing), level(healing, "llama_server_restarts")
    pid, urls = healing.pid, healing.urls
    regions = re.findall(r"/dev/shm/triton_python_backend_shm_region_\S+", Path(f"/proc/{pid}/maps").read_text())
    assert regions
    with ThreadPoolExecutor() as pool:
        metrics = Metrics(healing)
        failures = [pool.submit(client) for client in _clients(healing, served)]
        metrics.wait_for_slots(len(failures))
        die(healing)
        *_, completion, stream = [failure.result() for failure in failures]
    assert completion.startswith("503 ")
    assert ENGINE_GONE in completion
    assert ENGINE_GONE in stream
    until(lambda: _answers(served), lambda: "the endpoint has connected again")
    until(lambda: _is_up(healing), lambda: "it serves again")
    assert (healing.pid != pid, healing.urls) == (True, urls)
    assert not any(Path(region).exists() for region in regions)
    assert level(healing, "llama_server_restarts") == restarts + 1
    (line,) = _own_lines(healing)[len(lines) :]
    assert line.startswith(LINE)
    assert _computed(healing) == expected
    with LlamaClient(healing.grpc_url, "grpc") as client:
        assert client.generate("def", max_tokens=5, min_tokens=5, temperature=0).num_output_tokens == 5
