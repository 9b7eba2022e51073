"""Graceful shutdown: every accepted request is answered, every later one refused."""

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
"""Servers that are started ahead: a start is imports on one core, and so is a drain."""

AT_ONCE = 2
"""Servers that shut down at the same time: a shutdown is mostly waiting."""

CLIENTS = 4
SLOTS = 2
"""Fewer than clients: at every shutdown, a request waits in the model or in Triton's queue."""

CONFIGS = ("default", "streaming")
PROTOCOLS: tuple[Protocol, ...] = ("http", "grpc")
SHORT = SamplingParams(max_tokens=30, min_tokens=30, temperature=1.0, seed=1)
LONG = SamplingParams(max_tokens=480, min_tokens=480, temperature=0.0)


@dataclass
class Ended:
    """How a client ended: its answers, its error, and whether the model was unloaded by then.

    late: answers after the shutdown began. unloaded: the log said so when the last request was sent.
    """

    completed: int
    late: int
    unloaded: bool
    error: Exception

    def is_lost(self) -> bool:
        """Return whether the last request was neither answered nor refused although the model was loaded."""
        return isinstance(self.error, LlamaConnectionError) and not self.unloaded


@dataclass
class Client:
    """Sends one request after the other until one is not answered."""

    ask: Callable[[], int]
    unloaded: Callable[[], bool]
    shutdown: threading.Event
    completed: int = 0
    late: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def run(self) -> Ended:
        """Send requests; return how the last one failed."""
        while True:
            unloaded = self.unloaded()
            try:
                tokens = self.ask()
            except (OverloadedError, LlamaConnectionError) as error:
                return Ended(self.completed, self.late, unloaded, error)
            assert tokens == SHORT.max_tokens, "an answer is incomplete"
            with self.changed:
                self.completed += 1
                self.late += self.shutdown.is_set()
                self.changed.notify_all()

    def wait_for(self, completed: int) -> None:
        """Wait for a number of answers."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.completed >= completed, 60), "timed out"


def _client(server: LocalTriton, llama: LlamaClient, streams: bool, shutdown: threading.Event) -> Client:
    def generate() -> int:
        return llama.generate("The list class", SHORT).num_output_tokens

    def stream() -> int:
        with llama.stream("The list class", SHORT) as pieces:
            list(pieces)
        return pieces.completion.num_output_tokens

    return Client(stream if streams else generate, lambda: "llama: model unloaded" in server.log_text(), shutdown)


@contextmanager
def _idle_connection(server: LocalTriton) -> Iterator[None]:
    """Keep an idle connection open: Triton waits for it when it ends."""
    host, port = server.http_url.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    try:
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().read() == b""
        yield
    finally:
        connection.close()


def _end_under_load(server: LocalTriton, streams: bool, round_: int) -> list[Ended]:
    """Shut the server down while its clients send without pause; return how each of them ended."""
    with _idle_connection(server), ThreadPoolExecutor(CLIENTS) as pool:
        each = CLIENTS // len(PROTOCOLS)
        ways = zip(PROTOCOLS * each, _urls(server) * each, strict=True)
        llamas = [LlamaClient(url, protocol) for protocol, url in ways]
        shutdown = threading.Event()
        clients = [_client(server, llama, streams, shutdown) for llama in llamas]
        runs = [pool.submit(client.run) for client in clients]
        try:
            for client in clients:
                client.wait_for(1)
            # At another moment in each round.
            clients[round_ % CLIENTS].wait_for(2 + round_ // CLIENTS)
        finally:
            # Without it the clients wouldn't end.
            server.terminate()
            shutdown.set()
        ends = [run.result() for run in runs]
        assert server.wait() == 0
        for llama in llamas:
            llama.close()
    return ends


def _urls(server: LocalTriton) -> tuple[str, str]:
    return server.http_url, server.grpc_url


@contextmanager
def _started_ahead(configs: Sequence[str]) -> Iterator[Iterator[LocalTriton]]:
    """Start servers ahead of their use; the caller stops each one it takes."""
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
    """Shut one server down, and check that no request is lost."""
    try:
        with in_use(f"shutdown {index + 1}", server):
            ends = _end_under_load(server, index % 2 == 1, index)
            assert [end.error for end in ends if end.is_lost()] == []
            # Every request that reached the model was answered, and every answer reached its client.
            reasons = Counter(fields(message)["finish_reason"] for message in said(server))
            assert reasons == {"length": sum(end.completed for end in ends)}
            return ends
    finally:
        server.stop()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_accepted_request_is_lost_in_twenty_shutdowns(note: Note) -> None:
    configs = [CONFIGS[index % 2] for index in range(TIMES)]
    with _started_ahead(configs) as servers, ThreadPoolExecutor(AT_ONCE) as pool:
        ends = [end for round_ in pool.map(_round, range(TIMES), servers) for end in round_]
    assert len(ends) == TIMES * CLIENTS
    answered, late = sum(end.completed for end in ends), sum(end.late for end in ends)
    assert late > TIMES * SLOTS, "no waiting request was answered"
    seen = Counter(f"{type(end.error).__name__}{' of an unloaded model' if end.unloaded else ''}" for end in ends)
    ended = ", ".join(f"{count} {what}" for what, count in sorted(seen.items()))
    note(f"SIGTERM under load, {TIMES} times: {answered} answered, {late} of them after it; then {ended}")


@pytest.fixture(scope="module")
def state_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state") / "state.json"


def test_an_announced_shutdown_refuses_new_requests_and_answers_accepted_ones(state_file: Path, note: Note) -> None:
    """On one server: announce, not ready but serving, SIGTERM, refuse, answer, end."""
    supervised = Supervised(stuck_after=None, notice=3600.0, state_file=state_file)
    # Enough for the long requests, also on a busy machine.
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
            assert client.generate("def", max_tokens=1).num_output_tokens == 1, "it doesn't serve any more"

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
            assert not any(running.done() for running in lasting), "nothing was left to drain"
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
