"""The model is unloaded, or the server told to end, while it is busy: what was accepted is answered."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from server.calls import Call
from server.metrics import Metrics
from server.polling import until
from server.repositories import copy_repository
from server.servers import is_decoupled, serve
from server.streams import STREAM_WIRES, GrpcStream
from server.wires import WIRES, Answer, Refusal, ask, generate, post
from triton_local.server import LocalTriton

REQUESTS = [
    {"text_input": f"Row {index}", "max_tokens": 24, "min_tokens": 24, "temperature": 1.0, "seed": index}
    for index in range(8)
]
LONG = {"text_input": "a", "max_tokens": 200, "min_tokens": 200, "temperature": 0.0}
SHORT = {"text_input": "The class", "max_tokens": 60, "min_tokens": 60, "temperature": 0.0}

both = pytest.mark.parametrize("variant", ["default", "streaming"])


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
    futures = [pool.submit(_ask(server, number, request)) for number, request in enumerate(REQUESTS)]

    def all_are_in(now: Metrics) -> bool:
        waiting = now.now("llama_waiting_rows") + now.now("nv_inference_pending_request_count")
        return (now.now("llama_slots_in_use"), waiting) == (2, 6)

    metrics.wait(all_are_in, "two run, six wait")
    return futures


@both
def test_a_request_is_lost_when_the_model_is_unloaded_and_loaded_again(variant: str) -> None:
    # Not even this keeps rows from ending: Triton unloads a model when nobody is left in it.
    environment = {"LLAMA_SLOTS": "2", "LLAMA_DRAIN_SECONDS": "0"}
    options = ("--model-control-mode=explicit", "--load-model=llama")
    with serve(variant, environment, options=options) as server, ThreadPoolExecutor(8) as pool:
        alone = [ask(server, generate, **request) for request in REQUESTS]
        futures = _under_load(server, pool)
        models = f"http://{server.http_url}/v2/repository/models/llama"
        assert post(f"{models}/unload", b"{}")[0] == 200
        refusal = generate(server, SHORT)
        assert isinstance(refusal, Refusal)
        assert "llama" in refusal.message
        assert [future.result() for future in futures] == alone
        until(lambda: "llama: model unloaded" in server.log_text(), lambda: "finalize has run")
        assert post(f"{models}/load", b"{}")[0] == 200
        assert ask(server, generate, **REQUESTS[0]) == alone[0]
    assert server.exit_code == 0


@both
def test_a_request_is_lost_when_the_server_is_told_to_end(variant: str) -> None:
    with serve(variant, {"LLAMA_SLOTS": "2"}) as server, ThreadPoolExecutor(8) as pool:
        alone = [ask(server, generate, **request) for request in REQUESTS]
        futures = _under_load(server, pool)
        server.terminate()
        assert [future.result() for future in futures] == alone
        assert server.wait() == 0
        assert "llama: model unloaded" in server.log_text()


@pytest.mark.parametrize(("variant", "drain"), [("default", "60"), ("streaming", "60"), ("default", "0")])
def test_rows_do_not_get_the_time_that_the_settings_give_them(variant: str, drain: str, tmp_path: Path) -> None:
    repository = copy_repository(tmp_path, shim="stops_early")
    environment = {"LLAMA_SLOTS": "2", "LLAMA_DRAIN_SECONDS": drain}
    with serve(variant, environment, repository=repository) as server:
        alone = [ask(server, generate, **request) for request in (LONG, SHORT)]
        metrics = Metrics(server)
        with Call(server, LONG) as long, Call(server, SHORT | {"max_tokens": 150, "min_tokens": 150}) as other:
            metrics.wait(lambda now: now.now("llama_slots_in_use") == 2, "both slots are taken")
            with Call(server, SHORT | {"text_input": "stop now"}) as waiting:
                assert "the server is stopping" in str(waiting.outcome())
            outcomes = [long.outcome(), other.outcome()]
        if drain == "60":
            assert outcomes[0] == alone[0]
            assert isinstance(outcomes[1], Answer)
            assert outcomes[1].text.startswith(alone[1].text.rstrip("\N{REPLACEMENT CHARACTER}"))
            assert outcomes[1].num_output_tokens == 150
        else:
            assert all("the server is stopping" in str(outcome) for outcome in outcomes)
        until(lambda: "llama: model unloaded" in server.log_text(), lambda: "finalize has run")
        completed, unavailable = (2, 1) if drain == "60" else (0, 3)
        metrics.wait_for(unavailable, "llama_requests_total", finish_reason="unavailable")
        metrics.wait_for(completed, "llama_requests_total", finish_reason="length")


def test_a_stream_that_is_cut_short_ends_without_an_error(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path, shim="stops_early")
    environment = {"LLAMA_SLOTS": "1", "LLAMA_DRAIN_SECONDS": "0"}
    with serve("streaming", environment, repository=repository) as server:
        whole = ask(server, generate, **LONG)
        with GrpcStream(server) as stream:
            stream.ask({**LONG, "stream": True})
            came = [stream.next()]
            with Call(server, SHORT | {"text_input": "stop now"}) as waiting:
                assert "the server is stopping" in str(waiting.outcome())
            while came[-1].error is None:
                assert not came[-1].final
                came.append(stream.next())
        assert "the server is stopping" in came[-1].error
        assert whole.text.startswith("".join(row.text for response in came for row in response.rows))
