"""A server that is told to end answers what it has accepted, and nobody is left without an answer or an error."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import pytest
from notes import Note
from server.clients import WIRES, Refusal
from server.fleet import SLOW
from server.metrics import Metrics, fields, said
from server.servers import in_use, new_server, until
from triton_llama import LlamaClient, LlamaConnectionError, OverloadedError, SamplingParams
from triton_llama.endpoint import Protocol
from triton_llama.health import Address, Limits, read_state, ready
from triton_local.process import Supervised
from triton_local.server import LocalTriton

TIMES = 20
AHEAD = 2
"""Servers that are being started, or ready and not taken yet: a start is imports on one core, and so is a drain."""

AT_ONCE = 2
"""Servers that end at the same time: an end is mostly waiting."""

CLIENTS = 4
SLOTS = 2
"""Fewer than clients: whenever the server is told to end, somebody waits in the model or in Triton's queue."""

CONFIGS = ("default", "streaming")
PROTOCOLS: tuple[Protocol, ...] = ("http", "grpc")
SHORT = SamplingParams(max_tokens=30, min_tokens=30, temperature=1.0, seed=1)
LONG = SamplingParams(max_tokens=480, min_tokens=480, temperature=0.0)


@dataclass
class Ended:
    """How a client ended: with how many answers, with which error, and whether the model was unloaded by then.

    late: how many of the answers came after the server was told to end. unloaded: the log said so when the last request
    was sent, and nobody accepts it any more.
    """

    completed: int
    late: int
    unloaded: bool
    error: Exception

    def is_lost(self) -> bool:
        """Return whether the last request was neither answered nor refused though somebody was there to do it."""
        return isinstance(self.error, LlamaConnectionError) and not self.unloaded


@dataclass
class Client:
    """Somebody who asks and asks until he is not answered any more."""

    ask: Callable[[], int]
    unloaded: Callable[[], bool]
    told: threading.Event
    completed: int = 0
    late: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def run(self) -> Ended:
        """Ask, one request after the other, until one is not answered."""
        while True:
            unloaded = self.unloaded()
            try:
                tokens = self.ask()
            except (OverloadedError, LlamaConnectionError) as error:
                return Ended(self.completed, self.late, unloaded, error)
            assert tokens == SHORT.max_tokens, "an answer came that is not whole"
            with self.changed:
                self.completed += 1
                self.late += self.told.is_set()
                self.changed.notify_all()

    def wait_for(self, completed: int) -> None:
        """Wait until so many requests are answered."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.completed >= completed, 60), "nobody answers"


def _client(server: LocalTriton, llama: LlamaClient, streams: bool, told: threading.Event) -> Client:
    def generate() -> int:
        return llama.generate("The list class", SHORT).num_output_tokens

    def stream() -> int:
        with llama.stream("The list class", SHORT) as pieces:
            list(pieces)
        return pieces.completion.num_output_tokens

    return Client(stream if streams else generate, lambda: "llama: model unloaded" in server.log_text(), told)


@contextmanager
def _idle_connection(server: LocalTriton) -> Iterator[None]:
    """Keep a connection open that has been used and is used no more: Triton waits for it when it ends."""
    host, port = server.http_url.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    try:
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().read() == b""
        yield
    finally:
        connection.close()


def _end_under_load(server: LocalTriton, streams: bool, round_: int) -> list[Ended]:
    """Tell the server to end while its clients ask it without pause; return how it ended for each of them."""
    with _idle_connection(server), ThreadPoolExecutor(CLIENTS) as pool:
        each = CLIENTS // len(PROTOCOLS)
        ways = zip(PROTOCOLS * each, _urls(server) * each, strict=True)
        llamas = [LlamaClient(url, protocol) for protocol, url in ways]
        told = threading.Event()
        clients = [_client(server, llama, streams, told) for llama in llamas]
        runs = [pool.submit(client.run) for client in clients]
        try:
            for client in clients:
                client.wait_for(1)
            # Another moment each time: behind so many answers to somebody, in the middle of everybody else's.
            clients[round_ % CLIENTS].wait_for(2 + round_ // CLIENTS)
        finally:
            # Nor would the clients end without it.
            server.terminate()
            told.set()
        ends = [run.result() for run in runs]
        assert server.wait() == 0
        for llama in llamas:
            llama.close()
    return ends


def _urls(server: LocalTriton) -> tuple[str, str]:
    return server.http_url, server.grpc_url


@contextmanager
def _started_ahead(configs: Sequence[str]) -> Iterator[Iterator[LocalTriton]]:
    """Start one server after another, some ahead of those that are taken; who takes one stops it."""
    to_come = iter(configs)
    starts: deque[Future[LocalTriton]] = deque()
    with ThreadPoolExecutor(AHEAD) as pool:

        def start(count: int) -> None:
            starts.extend(pool.submit(_started, config) for config in islice(to_come, count))

        def take() -> Iterator[LocalTriton]:
            start(AHEAD)
            while starts:
                server = starts[0].result()
                starts.popleft()
                start(1)
                yield server

        try:
            yield take()
        finally:
            for one in starts:
                if not one.cancel() and one.exception() is None:
                    one.result().stop()


def _started(config: str) -> LocalTriton:
    server = new_server(config, {"LLAMA_SLOTS": str(SLOTS)})
    server.start()
    return server


def _round(index: int, server: LocalTriton) -> list[Ended]:
    """Tell one server to end, and check that nobody has lost anything by it."""
    try:
        with in_use(f"ended the {index + 1}. time", server):
            ends = _end_under_load(server, index % 2 == 1, index)
            assert [end.error for end in ends if end.is_lost()] == []
            # Whatever got as far as the model was answered there, and every answer has come to its client.
            reasons = Counter(fields(message)["finish_reason"] for message in said(server))
            assert reasons == {"length": sum(end.completed for end in ends)}
            return ends
    finally:
        server.stop()


@pytest.mark.timeout(1200)
def test_an_accepted_request_is_lost_when_the_server_is_told_to_end_twenty_times(note: Note) -> None:
    configs = [CONFIGS[index % 2] for index in range(TIMES)]
    with _started_ahead(configs) as servers, ThreadPoolExecutor(AT_ONCE) as pool:
        ends = [end for round_ in pool.map(_round, range(TIMES), servers) for end in round_]
    assert len(ends) == TIMES * CLIENTS
    answered, late = sum(end.completed for end in ends), sum(end.late for end in ends)
    assert late > TIMES * SLOTS, "only those who had a slot were answered: nobody waited"
    seen = Counter(f"{type(end.error).__name__}{' of an unloaded model' if end.unloaded else ''}" for end in ends)
    ended = ", ".join(f"{count} {what}" for what, count in sorted(seen.items()))
    note(f"SIGTERM under load, {TIMES} times: {answered} answered, {late} of them after it; then {ended}")


@pytest.fixture(scope="module")
def state_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state") / "state.json"


def test_a_drain_that_was_announced_gives_notice_again_and_whoever_comes_late_hears_nothing(
    state_file: Path, note: Note
) -> None:
    """The whole of it on one server: announce, not ready but serving, SIGTERM, refused, answered, ended."""
    supervised = Supervised(stuck_after=None, notice=3600.0, state_file=state_file)
    # Time enough for what lasts, on a machine that is busy otherwise, too.
    options = ("--exit-timeout-secs=200",)
    with new_server(environment=SLOW, options=options, supervised=supervised) as server, in_use("announced", server):
        with LlamaClient(server.http_url) as client:
            assert client.generate("def", max_tokens=1).num_output_tokens == 1
            until(lambda: _state(state_file) == "serving", lambda: "it serves")
            assert _ready(server, state_file)
            subprocess.run(
                [sys.executable, "-m", "triton_supervisor", "announce", "--seconds", "0"],
                env={**os.environ, "TRITON_STATE_FILE": str(state_file)},
                check=True,
                timeout=60,
            )
            until(lambda: not _ready(server, state_file), lambda: "it isn't ready any more")
            assert client.generate("def", max_tokens=1).num_output_tokens == 1, "it goes on serving"

        metrics = Metrics(server)
        with ThreadPoolExecutor(2) as pool:
            urls = dict(zip(PROTOCOLS, _urls(server), strict=True))
            lasting = [pool.submit(_tokens, url, protocol) for protocol, url in urls.items()]
            metrics.wait(lambda now: now.now("llama_slots_in_use") == 2, "two run")
            server.terminate()
            until(lambda: not _takes_requests(server), lambda: "it takes no more requests")
            refusals = [wire(server, {"text_input": "a"}) for wire in WIRES]
            for protocol, url in urls.items():
                with LlamaClient(url, protocol) as late, pytest.raises(OverloadedError, match="the server is stopping"):
                    late.generate("def", max_tokens=1)
            assert not any(running.done() for running in lasting), "there was nothing to drain for"
            assert [running.result() for running in lasting] == [LONG.max_tokens] * 2
        assert server.wait() == 0
    kinds = []
    for refusal in refusals:
        assert isinstance(refusal, Refusal)
        assert "has no available versions" in refusal.message
        kinds.append(refusal.kind)
    note(f"new requests during a drain are refused with {' '.join(kinds)}")
    assert set(kinds) <= {"404", "503", "StatusCode.NOT_FOUND", "StatusCode.UNAVAILABLE"}


def _tokens(url: str, protocol: Protocol) -> int:
    with LlamaClient(url, protocol) as client:
        return client.generate("def", LONG).num_output_tokens


def _state(state_file: Path) -> str:
    state = read_state(state_file)
    return "" if state is None else state.name


def _ready(server: LocalTriton, state_file: Path) -> bool:
    addresses = Address.parse(server.http_url, 8000), Address.parse(server.metrics_url, 8002)
    return ready(*addresses, Limits(timeout=60.0), state_file=state_file).ok


def _takes_requests(server: LocalTriton) -> bool:
    host, port = server.http_url.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    try:
        connection.request("GET", "/v2/models/llama/ready")
        return connection.getresponse().status == 200
    finally:
        connection.close()
