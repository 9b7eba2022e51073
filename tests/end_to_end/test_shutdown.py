"""Graceful shutdown: every accepted request is answered, every later one refused, and the processes end in order."""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest
from end_to_end.metrics import Metrics, fields, request_lines
from end_to_end.plans import copy_repository
from end_to_end.servers import HTTP, new_server, until
from end_to_end.wires import UNARY_WIRES, WIRES, Refusal, model_url
from notes import Note
from triton_llama import LlamaClient, LlamaConnectionError, OverloadedError, SamplingParams
from triton_llama.address import Protocol
from triton_local.runtime import STUB_NAME, find_wheel
from triton_local.server import LocalTriton

TIMES = 4
"""Servers that are shut down, at the same time: a start is imports on one core, a shutdown mostly waiting."""

MOMENTS = 20
"""Numbers of requests that are answered before a shutdown."""

CLIENTS = 4
SLOTS = 2
"""Fewer than clients: at every shutdown, a request waits in the model or in Triton's queue."""

PROTOCOLS: tuple[Protocol, ...] = ("http", "grpc")
SHORT = SamplingParams(max_tokens=30, min_tokens=30, temperature=1.0, seed=1)
LONG = SamplingParams(max_tokens=600, min_tokens=600, temperature=2.0)
"""Nothing of this text repeats, so that drafts don't shorten it."""


def _client(server: LocalTriton, protocol: Protocol) -> LlamaClient:
    return LlamaClient(server.http_address if protocol == "http" else server.grpc_address, protocol)


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
                    tokens = sum(chunk.num_output_tokens for chunk in llama.stream("The list class", SHORT))
                else:
                    tokens = llama.generate("The list class", SHORT).num_output_tokens
            except (OverloadedError, LlamaConnectionError) as error:
                if isinstance(error, LlamaConnectionError) and not unloaded:
                    raise
                return answered, f"{type(error).__name__}{' of an unloaded model' if unloaded else ''}"
            assert tokens == SHORT.max_tokens, "an answer is incomplete"
            answered += 1


def _shut_down_under_load(number: int) -> tuple[int, list[str]]:
    """Shut a server down while clients send without pause, at one of MOMENTS; every second one is streaming.

    Returns how many requests were answered after that, and how the clients ended.
    """
    streams = number % 2 == 1
    with new_server("streaming" if streams else "default", {"LLAMA_SLOTS": str(SLOTS)}) as server:
        with ThreadPoolExecutor(CLIENTS) as pool:
            protocols = PROTOCOLS * (CLIENTS // 2)
            runs = [pool.submit(_send_until_refused, server, protocol, streams) for protocol in protocols]
            try:
                until(
                    lambda: len(request_lines(server)) >= CLIENTS + number * MOMENTS // TIMES,
                    lambda: "some are answered",
                )
            finally:
                # Without it the clients wouldn't end.
                before = len(request_lines(server))
                server.terminate()
            answered, ends = zip(*(run.result() for run in runs), strict=True)
            assert server.wait() == 0
        # Every request that reached the model was answered, and every answer reached its client.
        assert Counter(fields(message)["finish_reason"] for message in request_lines(server)) == {
            "length": sum(answered)
        }
    return sum(answered) - before, list(ends)


@pytest.mark.long
def test_no_accepted_request_is_lost_in_shutdowns_under_load(note: Note) -> None:
    with ThreadPoolExecutor(TIMES) as pool:
        late, ends = zip(*pool.map(_shut_down_under_load, range(TIMES)), strict=True)
    assert sum(late) > TIMES * SLOTS, "no waiting request was answered"
    counted = ", ".join(f"{count} {end}" for end, count in sorted(Counter(chain.from_iterable(ends)).items()))
    note(f"SIGTERM under load, {TIMES} times: {sum(late)} answered after it; then {counted}")


def _exit_code_of_model(repository: Path, folder: Path) -> Path:
    """Have the exit code of llama's process written to a file; return its path."""
    status = folder / "status"
    real = find_wheel([Path(path) for path in sys.path]).stub(f"{sys.version_info.major}.{sys.version_info.minor}")
    # The Python backend prefers a stub in the model's folder to its own.
    stub = repository / "llama" / STUB_NAME
    stub.write_text(f"#!/bin/sh\n'{real}' \"$@\"\necho $? > '{status}.new'\nmv '{status}.new' '{status}'\n")
    stub.chmod(0o755)
    return status


def test_a_draining_server_answers_accepted_requests_only(tmp_path: Path, note: Note) -> None:
    def tokens(protocol: Protocol) -> int:
        with _client(server, protocol) as client:
            return client.generate("def", LONG, timeout=240).num_output_tokens

    # 200 s are enough for the long requests, also on a busy machine.
    settings, repository = {"TRITON_GRACE_SECONDS": "200"}, copy_repository(tmp_path, "slow_model")
    status = _exit_code_of_model(repository, tmp_path)
    with new_server("streaming", settings, repository) as server:
        metrics = Metrics(server)
        with ThreadPoolExecutor(2) as pool:
            lasting = [pool.submit(tokens, protocol) for protocol in PROTOCOLS]
            metrics.wait_for_slots(2)
            server.terminate()
            until(lambda: HTTP.get(model_url(server, "ready")).is_error, lambda: "it takes no more requests")
            refusals = [wire(server, {"text_input": "a"}) for wire in (*WIRES, *UNARY_WIRES)]
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
    log = server.log_text()
    assert 0 < log.index("unloaded 'llama_unary'") < log.index("unloaded 'llama'")
    # Metrics, requests or senders destroyed with the interpreter, not before, end it with signal 11 on Triton 2.51.
    until(status.exists, lambda: "the model's process has ended")
    assert status.read_text() == "0\n"
