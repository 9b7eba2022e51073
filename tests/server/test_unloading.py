"""The model is unloaded, or the server told to end, while it is busy: what was accepted is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest
from server.clients import WIRES, Answer, Refusal, ask, at_once, generate, post
from server.fleet import Fleet
from server.metrics import PENDING, Metrics
from server.servers import is_decoupled, until
from server.streams import STREAM_WIRES, Call, GrpcStream
from triton_local.server import LocalTriton

# Two that last until the others are seen to wait, though metrics are a moment late.
REQUESTS = [
    {"text_input": f"Row {index}", "max_tokens": tokens, "min_tokens": tokens, "temperature": 1.0, "seed": index}
    for index, tokens in enumerate([300, 300, 12, 12, 12, 12, 12, 12])
]
LONG = {"text_input": "a", "max_tokens": 200, "min_tokens": 200, "temperature": 0.0}
SHORT = {"text_input": "The class", "max_tokens": 60, "min_tokens": 60, "temperature": 0.0}


@pytest.fixture(scope="module")
def stopping(fleet: Fleet) -> Iterator[LocalTriton]:
    with fleet.server("stopping") as server:
        yield server


@pytest.fixture(scope="module")
def stopping_streaming(fleet: Fleet) -> Iterator[LocalTriton]:
    with fleet.server("stopping_streaming") as server:
        yield server


def _streamed(server: LocalTriton, number: int, request: dict[str, object]) -> Answer:
    return STREAM_WIRES[number % 3](server, request).whole


def _ask(server: LocalTriton, number: int, request: dict[str, object]) -> Callable[[], Answer]:
    """Return a way to ask: each of them in turn."""
    if not is_decoupled(server):
        return partial(ask, server, WIRES[number % 4], **request)
    return partial(ask, server, generate, **request) if number % 4 == 3 else partial(_streamed, server, number, request)


def _under_load(server: LocalTriton, pool: ThreadPoolExecutor) -> list[Future[Answer]]:
    """Let eight requests come for two slots, and return once two run and six wait."""
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


@pytest.fixture
def unloaded(fleet: Fleet) -> Iterator[LocalTriton]:
    with fleet.server("unloaded") as server:
        yield server


@pytest.fixture
def unloaded_streaming(fleet: Fleet) -> Iterator[LocalTriton]:
    with fleet.server("unloaded_streaming") as server:
        yield server


def test_a_request_is_lost_when_the_model_is_unloaded_and_loaded_again_or_the_server_told_to_end(
    unloaded: LocalTriton, unloaded_streaming: LocalTriton
) -> None:
    """Both servers at once: each has two long rows on one core."""
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
    """Have the model loaded anew, with so much time for its rows when it is unloaded."""
    ask(server, generate, text_input=f"begin with LLAMA_DRAIN_SECONDS={drain_seconds}", max_tokens=1)

    def begun() -> bool:
        settings = [line for line in server.log_text().splitlines() if "llama: settings: " in line]
        return f"drain_seconds={drain_seconds}," in settings[-1]

    until(begun, lambda: "the log says so")


@pytest.mark.parametrize("drain", [60, 0])
@pytest.mark.parametrize("config", ["stopping", "stopping_streaming"])
def test_rows_do_not_get_the_time_that_the_settings_give_them(
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


def test_a_stream_that_is_cut_short_ends_without_an_error(stopping_streaming: LocalTriton) -> None:
    server = stopping_streaming
    _begin(server, drain_seconds=0)
    whole = ask(server, generate, **LONG)
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
    assert whole.text.startswith("".join(row.text for response in came for row in response.rows))


def _times_unloaded(server: LocalTriton) -> int:
    return server.log_text().count("llama: model unloaded")
