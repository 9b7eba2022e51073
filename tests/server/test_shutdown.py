"""Graceful shutdown: every accepted request is answered, every later one refused, and the processes end in order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from notes import Note
from server.clients import WIRES, Answer, Refusal, ask, generate, grpc, model_url
from server.fleet import SLOW, copy_repository
from server.metrics import LASTING, Metrics, fields, level, said
from server.servers import HTTP, in_use, new_server, until
from server.streams import GrpcStream, grpc_stream, whole
from triton_llama import LlamaClient, LlamaConnectionError, OverloadedError, SamplingParams
from triton_llama.endpoint import Protocol
from triton_llama.health import Address, Limits, read_state, ready
from triton_local.installation import STUB_NAME, find_wheel
from triton_local.process import Supervised
from triton_local.server import LocalTriton

MOMENTS = 20
"""Numbers of requests that are answered before a shutdown."""

AT_ONCE = 4
"""Servers at the same time: a start is imports on one core, a shutdown mostly waiting."""

CLIENTS = 4
SLOTS = 2
"""Fewer than clients: at every shutdown, a request waits in the model or in Triton's queue."""

TWO_SLOTS = {"LLAMA_SLOTS": "2", **SLOW}
PROTOCOLS: tuple[Protocol, ...] = ("http", "grpc")
SHORT = SamplingParams(max_tokens=30, min_tokens=30, temperature=1.0, seed=1)
LONG = SamplingParams(max_tokens=480, min_tokens=480, temperature=0.0)


def _client(server: LocalTriton, protocol: Protocol) -> LlamaClient:
    return LlamaClient(server.http_url if protocol == "http" else server.grpc_url, protocol)


def _send_until_refused(server: LocalTriton, protocol: Protocol, streams: bool) -> tuple[int, str]:
    """Send one request after the other; return how many were answered, and how the last one failed.

    One that is neither answered nor refused although the model is loaded raises LlamaConnectionError.
    """
    answered = 0
    with _client(server, protocol) as llama:
        while True:
            unloaded = "llama: model unloaded" in server.log_text()
            try:
                if streams:
                    tokens = sum(piece.num_output_tokens for piece in llama.stream("The list class", SHORT))
                else:
                    tokens = llama.generate("The list class", SHORT).num_output_tokens
            except (OverloadedError, LlamaConnectionError) as error:
                if isinstance(error, LlamaConnectionError) and not unloaded:
                    raise
                return answered, f"{type(error).__name__}{' of an unloaded model' if unloaded else ''}"
            assert tokens == SHORT.max_tokens, "an answer is incomplete"
            answered += 1


def _shut_down_under_load(number: int) -> tuple[int, list[str]]:
    """Shut a server down while clients send without pause, at one of MOMENTS.

    Returns how many requests were answered after that, and how the clients ended.
    """
    streams = number % 2 == 1
    with new_server("streaming" if streams else "default", {"LLAMA_SLOTS": str(SLOTS)}) as server:
        with in_use(f"shutdown {number}", server), ThreadPoolExecutor(CLIENTS) as pool:
            protocols = PROTOCOLS * (CLIENTS // 2)
            runs = [pool.submit(_send_until_refused, server, protocol, streams) for protocol in protocols]
            try:
                until(lambda: len(said(server)) >= CLIENTS + number % MOMENTS, lambda: "some are answered")
            finally:
                # Without it the clients wouldn't end.
                before = len(said(server))
                server.terminate()
            answered, ends = zip(*(run.result() for run in runs), strict=True)
            assert server.wait() == 0
        # Every request that reached the model was answered, and every answer reached its client.
        assert Counter(fields(message)["finish_reason"] for message in said(server)) == {"length": sum(answered)}
    return sum(answered) - before, list(ends)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "times", [pytest.param(20, marks=pytest.mark.long), pytest.param(100, marks=pytest.mark.campaign)]
)
def test_no_accepted_request_is_lost_in_many_shutdowns(times: int, note: Note) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        late, ends = zip(*pool.map(_shut_down_under_load, range(times)), strict=True)
    assert sum(late) > times * SLOTS, "no waiting request was answered"
    counted = ", ".join(f"{count} {end}" for end, count in sorted(Counter(chain.from_iterable(ends)).items()))
    note(f"SIGTERM under load, {times} times: {sum(late)} answered after it; then {counted}")


def test_an_announced_shutdown_refuses_new_requests_and_answers_accepted_ones(tmp_path: Path, note: Note) -> None:
    """On one server: announce, not ready but serving, SIGTERM, refuse, answer, end."""
    state_file = tmp_path / "state.json"

    def is_ready() -> bool:
        addresses = Address.parse(server.http_url, 8000), Address.parse(server.metrics_url, 8002)
        return ready(*addresses, Limits(timeout=60.0), state_file=state_file).ok

    def is_serving() -> bool:
        state = read_state(state_file)
        return state is not None and state.name == "serving"

    def tokens(protocol: Protocol) -> int:
        with _client(server, protocol) as client:
            return client.generate("def", LONG).num_output_tokens

    supervised = Supervised(stuck_after=None, notice=3600.0, state_file=state_file, restarts=0)
    # Enough for the long requests, also on a busy machine.
    options = ("--exit-timeout-secs=200",)
    with new_server(environment=SLOW, options=options, supervised=supervised) as server, in_use("announced", server):
        with _client(server, "http") as client:
            until(is_serving, lambda: "it serves")
            assert is_ready()
            subprocess.run(
                [sys.executable, "-m", "triton_supervisor", "announce", "--seconds", "0"],
                env={**os.environ, "TRITON_STATE_FILE": str(state_file)},
                check=True,
                timeout=60,
            )
            until(lambda: not is_ready(), lambda: "it isn't ready any more")
            assert client.generate("def", max_tokens=1).num_output_tokens == 1, "it doesn't serve any more"
        metrics = Metrics(server)
        with ThreadPoolExecutor(2) as pool:
            lasting = [pool.submit(tokens, protocol) for protocol in PROTOCOLS]
            metrics.wait_for_slots(2)
            server.terminate()
            until(lambda: HTTP.get(model_url(server, "ready")).is_error, lambda: "it takes no more requests")
            refusals = [wire(server, {"text_input": "a"}) for wire in WIRES]
            for protocol in PROTOCOLS:
                with _client(server, protocol) as late, pytest.raises(OverloadedError, match="the server is stopping"):
                    late.generate("def", max_tokens=1)
            assert not any(running.done() for running in lasting), "nothing was left to drain"
            assert [running.result() for running in lasting] == [LONG.max_tokens] * 2
        assert server.wait() == 0
    kinds = [refusal.kind for refusal in refusals if isinstance(refusal, Refusal)]
    assert [refusal for refusal in refusals if "has no available versions" not in str(refusal)] == []
    note(f"new requests during a drain are refused with {' '.join(kinds)}")
    assert set(kinds) <= {"404", "503", "StatusCode.NOT_FOUND", "StatusCode.UNAVAILABLE"}


@pytest.mark.parametrize(
    ("drain_seconds", "ends"),
    [(0, {"unavailable": 3}), pytest.param(60, {"length": 2, "unavailable": 1}, marks=pytest.mark.long)],
)
def test_running_sequences_finish_within_drain_seconds_or_get_an_error(
    tmp_path: Path, drain_seconds: int, ends: dict[str, int]
) -> None:
    environment = {**TWO_SLOTS, "LLAMA_DRAIN_SECONDS": str(drain_seconds)}
    with (
        new_server("streaming", environment, copy_repository(tmp_path, "faulty_model")) as server,
        in_use("stopping", server),
    ):
        with GrpcStream(server) as stream, ThreadPoolExecutor(1) as pool:
            stream.ask({**LASTING, "stream": True})
            came = [stream.next()]
            assert came[0].error is None, "the stream has begun"
            single = pool.submit(generate, server, LASTING)
            until(lambda: level(server, "llama_slots_in_use") == 2, lambda: "both run")
            waiting = generate(server, {"text_input": "fault stop"})
            while came[-1].error is None and not came[-1].final:
                came.append(stream.next())
            outcomes = [came[-1], single.result(), waiting]
        server.terminate()
        assert server.wait() == 0
        assert ["the server is stopping" in str(outcome) for outcome in outcomes] == [not drain_seconds] * 2 + [True]
        assert Counter(fields(message)["finish_reason"] for message in said(server)) == ends


@pytest.mark.long
@pytest.mark.parametrize("variant", ["default", "streaming"])
def test_accepted_requests_are_answered_through_unload_load_and_shutdown(variant: str) -> None:
    """Without a supervisor, which keeps the repository API to itself; without a drain, because Triton waits."""
    loaded = ["llama", "llama_unary"] if variant == "streaming" else ["llama"]
    options = (
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in loaded),
        "--exit-timeout-secs=120",
    )
    environment = {**TWO_SLOTS, "LLAMA_DRAIN_SECONDS": "0"}
    with new_server(variant, environment, options=options, supervised=None) as server:
        models = f"http://{server.http_url}/v2/repository/models/llama"

        def over_grpc() -> Answer:
            return ask(server, grpc, **LASTING) if variant == "default" else whole(server, grpc_stream, LASTING)

        def two_run_and_two_wait() -> list[Future[Answer]]:
            metrics = Metrics(server)
            accepted = [pool.submit(way) for way in (partial(ask, server, generate, **LASTING), over_grpc) * 2]
            metrics.wait_for_slots(2, waiting=2)
            return accepted

        with in_use("unloaded", server), ThreadPoolExecutor(4) as pool:
            alone = ask(server, generate, **LASTING)
            accepted = two_run_and_two_wait()
            assert HTTP.post(f"{models}/unload").is_success
            assert isinstance(generate(server, LASTING), Refusal)
            assert [one.result() for one in accepted] == [alone] * 4
            until(lambda: "llama: model unloaded" in server.log_text(), lambda: "finalize has run")
            assert HTTP.post(f"{models}/load").is_success
            accepted = two_run_and_two_wait()
            server.terminate()
            assert [one.result() for one in accepted] == [alone] * 4
            assert server.wait() == 0
        assert server.log_text().count("llama: model unloaded") == 2


@pytest.mark.parametrize("variant", ["batched_int8", "streaming", pytest.param("default", marks=pytest.mark.long)])
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
        if variant == "streaming":
            assert grpc_stream(server, {"text_input": "The class", "max_tokens": 3}).whole.num_output_tokens == 3
        server.terminate()
        assert server.wait() == 0
    until(status.exists, lambda: "the model's process has ended")
    assert status.read_text() == "0\n"
