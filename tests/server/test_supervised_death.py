"""A dead model: its clients get an error, and the server ends with code 70 and one line."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from server.metrics import Metrics
from server.servers import is_decoupled, line_of_death, model_process
from triton_llama import LlamaClient, LlamaConnectionError, SamplingParams, ServerError
from triton_llama.endpoint import Protocol
from triton_local.server import LocalTriton
from triton_supervisor.process_table import ModelProcess

NOT_HEALTHY = "Stub process 'llama_0_0' is not healthy"
"""Triton's answer to requests in its queue or in the model when the process doesn't respond."""
LONG = SamplingParams(max_tokens=500, min_tokens=500, temperature=1.0, seed=1)


@contextmanager
def _under_load(server: LocalTriton) -> Iterator[ModelProcess]:
    """Keep the server's two slots and its queue busy, with streams where the config has them; all requests must fail.

    Yields the model's process once a request over each protocol runs, one waits in the model, and one over each waits
    in Triton's queue. A request fails by a closed connection, or by Triton's error if it notices first.
    """
    streams = is_decoupled(server)

    def ask(protocol: Protocol) -> None:
        with LlamaClient(server.http_url if protocol == "http" else server.grpc_url, protocol) as client:
            if streams:
                list(client.stream("def", LONG))
            else:
                client.generate("def", LONG)

    metrics = Metrics(server)
    futures: list[Future[None]] = []
    protocols: tuple[Protocol, ...] = ("http", "grpc")
    with ThreadPoolExecutor(5) as pool:
        for more, waiting in ((protocols, 0), (protocols[:1], 1), (protocols, 3)):
            futures += [pool.submit(ask, protocol) for protocol in more]
            metrics.wait_for_slots(2, waiting)
        assert not any(future.done() for future in futures)
        model = model_process(server)
        yield model
        for future in futures:
            with pytest.raises((LlamaConnectionError, ServerError)) as failed:
                future.result()
            assert isinstance(failed.value, LlamaConnectionError) or NOT_HEALTHY in str(failed.value)


@pytest.mark.parametrize(
    "server", ["killed_model", pytest.param("killed_model_streaming", marks=pytest.mark.long)], indirect=True
)
def test_a_killed_model_ends_the_server_and_its_requests(server: LocalTriton) -> None:
    with _under_load(server) as model:
        os.kill(model.pid, signal.SIGKILL)
    assert line_of_death(server).startswith(f"the model process {model.pid} is gone: ")


@pytest.mark.long
def test_a_stuck_model_ends_the_server_and_its_requests(stuck_model: LocalTriton) -> None:
    with _under_load(stuck_model) as model:
        os.kill(model.pid, signal.SIGSTOP)
    line = line_of_death(stuck_model)
    assert line.startswith("the model is dead: requests wait, the last step was ")
    assert not model.runs()
