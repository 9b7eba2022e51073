"""A dead model: its clients get an error, and the server ends with code 70 and one line."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
from server.clients import Refusal, generate
from server.fleet import Fleet
from server.metrics import PENDING, Metrics
from server.servers import is_decoupled, until
from triton_llama import LlamaClient, LlamaConnectionError, SamplingParams, ServerError
from triton_llama.endpoint import Protocol
from triton_local.server import LocalTriton
from triton_supervisor.process_table import ModelProcess, model_processes

DEAD = 70
PREFIX = "triton_local: "
NOT_HEALTHY = "Stub process 'llama_0_0' is not healthy"
"""Triton's answer to requests in its queue or in the model when the process doesn't respond."""
LONG = SamplingParams(max_tokens=500, min_tokens=500, temperature=1.0, seed=1)
PROTOCOLS: tuple[Protocol, ...] = ("http", "grpc")


def _generate(server: LocalTriton, protocol: Protocol) -> None:
    url = server.http_url if protocol == "http" else server.grpc_url
    with LlamaClient(url, protocol) as client:
        client.generate("def", LONG)


def _stream(server: LocalTriton, protocol: Protocol) -> None:
    url = server.http_url if protocol == "http" else server.grpc_url
    with LlamaClient(url, protocol) as client:
        list(client.stream("def", LONG))


@contextmanager
def _under_load(server: LocalTriton) -> Iterator[list[Future[None]]]:
    """Keep the server's two slots and its queue busy, with streams where the config has them.

    Yields once a request over each protocol runs, one waits in the model, and one over each waits in Triton's queue.
    """
    ask: Callable[[LocalTriton, Protocol], None] = _stream if is_decoupled(server) else _generate
    metrics = Metrics(server)
    with ThreadPoolExecutor(5) as pool:

        def send(*protocols: Protocol) -> list[Future[None]]:
            return [pool.submit(partial(ask, server, protocol)) for protocol in protocols]

        futures = send(*PROTOCOLS)
        metrics.wait(lambda now: now.now("llama_slots_in_use") == 2, "two run")
        futures += send("http")
        metrics.wait(lambda now: now.now("llama_waiting_rows") == 1, "one waits in the model")
        futures += send(*PROTOCOLS)
        metrics.wait(lambda now: now.now(PENDING) == 2, "two wait in Triton")
        assert not any(future.done() for future in futures)
        yield futures


def _all_fail(futures: Sequence[Future[None]]) -> None:
    """Check that every request fails: by a closed connection, or by Triton's error if it notices first."""
    for future in futures:
        with pytest.raises((LlamaConnectionError, ServerError)) as failed:
            future.result()
        assert isinstance(failed.value, LlamaConnectionError) or NOT_HEALTHY in str(failed.value)


def _dies(server: LocalTriton, model: ModelProcess) -> str:
    """Wait for the server to end with DEAD; return its one line about it.

    model: its process, which must not outlive the server.
    """
    assert server.wait() == DEAD
    (line,) = [line for line in server.log_text().splitlines() if line.startswith(PREFIX)]
    assert line.endswith(f"; the server ends with code {DEAD}")
    assert not model.runs()
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)
    return line.removeprefix(PREFIX)


@pytest.mark.parametrize("config", ["killed_model", "killed_model_streaming"])
def test_a_killed_model_ends_the_server_and_its_requests(config: str, fleet: Fleet) -> None:
    with fleet.server(config) as server, _under_load(server) as futures:
        (model,) = model_processes(server.pid)
        os.kill(model.pid, signal.SIGKILL)
        _all_fail(futures)
        assert _dies(server, model).startswith(f"the model process {model.pid} is gone: ")


@pytest.mark.parametrize("config", ["stuck_model"])
def test_a_stuck_model_ends_the_server_and_its_requests(config: str, fleet: Fleet) -> None:
    with fleet.server(config) as server, _under_load(server) as futures:
        (model,) = model_processes(server.pid)
        os.kill(model.pid, signal.SIGSTOP)
        _all_fail(futures)
        line = _dies(server, model)
        # The second is Triton's message about a process that doesn't respond; it still runs.
        assert line.startswith(("the model is dead: no token within ", "the model is dead: HTTP 400: Stub process "))
        assert ", the last step was " in line


@pytest.mark.parametrize("config", ["broken_model"])
def test_a_model_that_fails_every_step_ends_the_server(config: str, fleet: Fleet) -> None:
    with fleet.server(config) as server:
        (model,) = model_processes(server.pid)
        broken = generate(server, {"text_input": "break for good", "max_tokens": 4})
        assert isinstance(broken, Refusal)
        with LlamaClient(server.http_url) as client, pytest.raises(ServerError, match="decoding failed"):
            client.generate("def", max_tokens=4)
        until(lambda: server.exit_code is not None, lambda: "the server ends")
        assert "decoding failed" in _dies(server, model)
