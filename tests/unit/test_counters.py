"""Counters between two moments: interpolation, and a metrics endpoint that answers or lacks one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from perf.article.counters import NAMES, Sample, Sampling, value_at

TOKENS = "llama_generated_tokens_total"
SAMPLES: list[Sample] = [(10.0, {TOKENS: 100.0}), (11.0, {TOKENS: 100.0}), (12.0, {TOKENS: 140.0})]


class Endpoint(BaseHTTPRequestHandler):
    """A metrics endpoint whose counters grow by one with every reading, beside another model's."""

    names: ClassVar[tuple[str, ...]] = NAMES
    read: ClassVar[int] = 0
    enough: ClassVar[threading.Event] = threading.Event()

    def do_GET(self) -> None:
        Endpoint.read += 1
        lines = [f'{name}{{model="llama",version="1"}} {Endpoint.read}' for name in Endpoint.names]
        others = [f'{name}{{model="another",version="1"}} 1000000' for name in NAMES]
        body = "\n".join(["# HELP what it is", *lines, *others, ""]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if Endpoint.read >= 4 or Endpoint.names != NAMES:
            Endpoint.enough.set()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def endpoint() -> Iterator[ThreadingHTTPServer]:
    Endpoint.names, Endpoint.read, Endpoint.enough = NAMES, 0, threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_counter_is_interpolated_between_two_readings() -> None:
    moments = (10.0, 10.5, 11.0, 11.25, 12.0)
    assert [value_at(SAMPLES, TOKENS, moment) for moment in moments] == [100, 100, 100, 110, 140]


@pytest.mark.parametrize("moment", [9.9, 12.1])
def test_a_moment_outside_of_the_readings_is_refused(moment: float) -> None:
    with pytest.raises(ValueError, match=f"{TOKENS} was read from 10.0 to 12.0, not at {moment}"):
        value_at(SAMPLES, TOKENS, moment)


def test_readings_enclose_the_block(endpoint: ThreadingHTTPServer) -> None:
    with Sampling(f"127.0.0.1:{endpoint.server_port}") as sampling:
        began = time.time()
        assert Endpoint.enough.wait(30)
        ended = time.time()
    assert sampling.last >= ended
    # Of our model, not of the other one.
    assert 0 < sampling.growth(TOKENS, began, ended) <= Endpoint.read


def test_a_missing_counter_is_an_error_at_once(endpoint: ThreadingHTTPServer) -> None:
    Endpoint.names = NAMES[1:]
    with pytest.raises(KeyError, match=NAMES[0]), Sampling(f"127.0.0.1:{endpoint.server_port}"):
        pytest.fail("a server without the counter was sampled")


def test_a_reading_that_fails_later_fails_the_measurement(endpoint: ThreadingHTTPServer) -> None:
    sampling = Sampling(f"127.0.0.1:{endpoint.server_port}")
    sampling.__enter__()
    Endpoint.names = NAMES[1:]
    assert Endpoint.enough.wait(30)
    with pytest.raises(KeyError, match=NAMES[0]):
        sampling.__exit__(None, None, None)
