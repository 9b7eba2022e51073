"""A model that is dead, in whatever way: its clients hear of it, and the server ends with a code and a line."""

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
SAYS = "triton_local: "
NOT_HEALTHY = "Stub process 'llama_0_0' is not healthy"
"""Triton's answer to who waits in its queue, or in the model, when it sees that the process doesn't answer."""
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


def _hear_of_it(futures: Sequence[Future[None]]) -> None:
    """Check that nobody is left without an answer: a broken connection, or what Triton says if it notices first."""
    for future in futures:
        with pytest.raises((LlamaConnectionError, ServerError)) as heard:
            future.result()
        assert isinstance(heard.value, LlamaConnectionError) or NOT_HEALTHY in str(heard.value)


def _dies(server: LocalTriton, model: ModelProcess) -> str:
    """Wait for the server's end, which must be a death; return the one line that it says about it.

    model: its process, looked up before anything has happened to it. It must not outlive its server.
    """
    assert server.wait() == DEAD
    (line,) = [line for line in server.log_text().splitlines() if line.startswith(SAYS)]
    assert line.endswith(f"; the server ends with code {DEAD}")
    assert not model.runs()
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)
    return line.removeprefix(SAYS)


@pytest.mark.parametrize("config", ["killed_model", "killed_model_streaming"])
def test_a_killed_model_leaves_its_clients_in_silence(config: str, fleet: Fleet) -> None:
    with fleet.server(config) as server, _under_load(server) as futures:
        (model,) = model_processes(server.pid)
        os.kill(model.pid, signal.SIGKILL)
        _hear_of_it(futures)
        assert _dies(server, model).startswith(f"the model process {model.pid} is gone: ")


@pytest.mark.parametrize("config", ["stuck_model"])
def test_a_model_that_stands_still_is_waited_for(config: str, fleet: Fleet) -> None:
    with fleet.server(config) as server, _under_load(server) as futures:
        (model,) = model_processes(server.pid)
        os.kill(model.pid, signal.SIGSTOP)
        _hear_of_it(futures)
        line = _dies(server, model)
        # The second are Triton's words for a process that doesn't answer it; it still runs.
        assert line.startswith(("the model is dead: no token within ", "the model is dead: HTTP 400: Stub process "))
        assert ", the last step was " in line


@pytest.mark.parametrize("config", ["broken_model"])
def test_a_model_that_fails_every_step_goes_on_failing(config: str, fleet: Fleet) -> None:
    with fleet.server(config) as server:
        (model,) = model_processes(server.pid)
        broken = generate(server, {"text_input": "break for good", "max_tokens": 4})
        assert isinstance(broken, Refusal)
        with LlamaClient(server.http_url) as client, pytest.raises(ServerError, match="decoding failed"):
            client.generate("def", max_tokens=4)
        until(lambda: server.exit_code is not None, lambda: "the server ends")
        assert "decoding failed" in _dies(server, model)
