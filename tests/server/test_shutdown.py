"""Graceful shutdown: when a busy model is unloaded or the server stops, accepted requests are answered."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from server.clients import WIRES, Answer, Refusal, ask, at_once, generate, post
from server.fleet import copy_repository
from server.metrics import PENDING, Metrics
from server.servers import is_decoupled, new_server, until
from server.streams import STREAM_WIRES, Call, GrpcStream, whole
from triton_local.installation import STUB_NAME, find_wheel
from triton_local.server import LocalTriton

# The first two run until the metrics, which are a moment late, show that the others wait.
REQUESTS = [
    {"text_input": f"Row {index}", "max_tokens": tokens, "min_tokens": tokens, "temperature": 1.0, "seed": index}
    for index, tokens in enumerate([300, 300, 12, 12, 12, 12, 12, 12])
]
LONG = {"text_input": "a", "max_tokens": 200, "min_tokens": 200, "temperature": 0.0}
SHORT = {"text_input": "The class", "max_tokens": 60, "min_tokens": 60, "temperature": 0.0}


def _ask(server: LocalTriton, number: int, request: dict[str, object]) -> Callable[[], Answer]:
    """Return a job over one of the endpoints, in turn."""
    if not is_decoupled(server):
        return partial(ask, server, WIRES[number % 4], **request)
    return (
        partial(ask, server, generate, **request)
        if number % 4 == 3
        else partial(whole, server, STREAM_WIRES[number % 3], request)
    )


def _under_load(server: LocalTriton, pool: ThreadPoolExecutor) -> list[Future[Answer]]:
    """Send eight requests for two slots; return when two run and six wait."""
    metrics = Metrics(server)
    ways = [_ask(server, number, request) for number, request in enumerate(REQUESTS)]
    futures = [pool.submit(way) for way in ways[:2]]
    metrics.wait(lambda now: now.now("llama_slots_in_use") == 2, "two run")
    futures += [pool.submit(way) for way in ways[2:]]

    def all_are_in(now: Metrics) -> bool:
        waiting = now.now("llama_waiting_rows") + now.now(PENDING)
        return (now.now("llama_slots_in_use"), waiting) == (2, 6)

    metrics.wait(all_are_in, "two run, six wait")
    return futures


@pytest.mark.long
def test_accepted_requests_are_answered_through_unload_load_and_shutdown(
    unloaded: LocalTriton, unloaded_streaming: LocalTriton
) -> None:
    """Both servers at once: each runs two long sequences on one core."""
    at_once([partial(_unload_load_and_end, server) for server in (unloaded, unloaded_streaming)])


def _unload_load_and_end(server: LocalTriton) -> None:
    with ThreadPoolExecutor(8) as pool:
        undisturbed = at_once([partial(ask, server, generate, **request) for request in REQUESTS])
        futures = _under_load(server, pool)
        models = f"http://{server.http_url}/v2/repository/models/llama"
        assert post(f"{models}/unload", b"{}")[0] == 200
        refusal = generate(server, SHORT)
        assert isinstance(refusal, Refusal)
        assert "llama" in refusal.message
        assert [future.result() for future in futures] == undisturbed
        until(lambda: _times_unloaded(server) == 1, lambda: "finalize has run")
        assert post(f"{models}/load", b"{}")[0] == 200
        assert ask(server, generate, **REQUESTS[-1]) == undisturbed[-1]

        futures = _under_load(server, pool)
        server.terminate()
        assert [future.result() for future in futures] == undisturbed
        assert server.wait() == 0
        assert _times_unloaded(server) == 2


def _begin(server: LocalTriton, drain_seconds: int) -> None:
    """Reload the model with another drain_seconds."""
    ask(server, generate, text_input=f"begin with LLAMA_DRAIN_SECONDS={drain_seconds}", max_tokens=1)

    def begun() -> bool:
        settings = [line for line in server.log_text().splitlines() if "llama: settings: " in line]
        return f"drain_seconds={drain_seconds}," in settings[-1]

    until(begun, lambda: "the log shows the setting")


@pytest.mark.parametrize("drain", [60, 0])
@pytest.mark.parametrize("config", ["stopping", "stopping_streaming"])
def test_sequences_finish_within_drain_seconds_or_get_an_error(
    config: str, drain: int, request: pytest.FixtureRequest
) -> None:
    server: LocalTriton = request.getfixturevalue(config)
    _begin(server, drain)
    unloaded = _times_unloaded(server)
    alone = [ask(server, generate, **one) for one in (LONG, SHORT)]
    metrics = Metrics(server)
    with Call(server, LONG) as long, Call(server, SHORT | {"max_tokens": 150, "min_tokens": 150}) as other:
        metrics.wait(lambda now: now.now("llama_slots_in_use") == 2, "both slots are taken")
        with Call(server, SHORT | {"text_input": "stop now"}) as waiting:
            assert "the server is stopping" in str(waiting.outcome())
        outcomes = [long.outcome(), other.outcome()]
    if drain:
        assert outcomes[0] == alone[0]
        assert isinstance(outcomes[1], Answer)
        assert outcomes[1].text.startswith(alone[1].text.rstrip("\N{REPLACEMENT CHARACTER}"))
        assert outcomes[1].num_output_tokens == 150
    else:
        assert all("the server is stopping" in str(outcome) for outcome in outcomes)
    until(lambda: _times_unloaded(server) == unloaded + 1, lambda: "finalize has run")
    completed, unavailable = (2, 1) if drain else (0, 3)
    metrics.wait_for(unavailable, "llama_requests_total", finish_reason="unavailable")
    metrics.wait_for(completed, "llama_requests_total", finish_reason="length")


def test_a_stream_aborted_by_shutdown_ends_with_an_error(stopping_streaming: LocalTriton) -> None:
    server = stopping_streaming
    _begin(server, drain_seconds=0)
    complete = ask(server, generate, **LONG)
    metrics = Metrics(server)
    with GrpcStream(server) as stream, Call(server, LONG):
        stream.ask({**LONG, "stream": True})
        came = [stream.next()]
        metrics.wait(lambda now: now.now("llama_slots_in_use") == 2, "both slots are taken")
        with Call(server, SHORT | {"text_input": "stop now"}) as waiting:
            assert "the server is stopping" in str(waiting.outcome())
        while came[-1].error is None:
            assert not came[-1].final
            came.append(stream.next())
    assert "the server is stopping" in came[-1].error
    assert complete.text.startswith("".join(row.text for response in came for row in response.rows))


def _times_unloaded(server: LocalTriton) -> int:
    return server.log_text().count("llama: model unloaded")


@pytest.mark.parametrize("variant", ["default", "batched_int8", "streaming"])
def test_the_models_process_exits_with_code_0(tmp_path: Path, variant: str) -> None:
    """Metrics, requests or senders destroyed with the interpreter, not before, end it with signal 11 on Triton 2.51."""
    repository = copy_repository(tmp_path)
    status = tmp_path / "status"
    real = find_wheel([Path(folder) for folder in sys.path]).stub(f"{sys.version_info.major}.{sys.version_info.minor}")
    # The Python backend prefers a stub in the model's folder to its own.
    stub = repository / "llama" / STUB_NAME
    stub.write_text(f"#!/bin/sh\n'{real}' \"$@\"\necho $? > '{status}.new'\nmv '{status}.new' '{status}'\n")
    stub.chmod(0o755)
    with new_server(variant, repository=repository) as server:
        ask(server, generate, text_input="The class", max_tokens=3)
        server.terminate()
        assert server.wait() == 0
    until(status.exists, lambda: "the model's process has ended")
    assert status.read_text() == "0\n"
