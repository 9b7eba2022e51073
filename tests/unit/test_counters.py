"""Counters between two moments: interpolation, and a metrics endpoint that answers or lacks one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from unit.peers import server

from perf import metrics
from perf.bench.counters import NAMES, Samples, sampled

TOKENS = "llama_generated_tokens_total"
SAMPLES = Samples([(10.0, {TOKENS: 100.0}), (11.0, {TOKENS: 100.0}), (12.0, {TOKENS: 140.0})])


class Endpoint:
    """A metrics endpoint whose counters grow by one with every reading, beside another model's."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = NAMES
        self.readings, self.enough = 0, threading.Event()
        self.url = ""

    def answer(self, connection: socket.socket) -> None:
        connection.recv(65536)
        self.readings += 1
        lines = [f'{name}{{model="llama",version="1"}} {self.readings}' for name in self.names]
        others = [f'{name}{{model="another",version="1"}} 1000000' for name in NAMES]
        reasons = [f'llama_requests_total{{finish_reason="{reason}",model="llama"}} 1.5e0' for reason in ("a", "b")]
        page = "\n".join(["# HELP what it is", *lines, *others, *reasons, "nv_cpu_memory_total_bytes 25", ""]).encode()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(page), page))
        connection.shutdown(socket.SHUT_RDWR)
        if self.readings >= 4 or self.names != NAMES:
            self.enough.set()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    with server(endpoint.answer) as port:
        endpoint.url = f"127.0.0.1:{port}"
        yield endpoint


def test_a_counter_is_interpolated_between_two_readings_and_refused_outside_of_them() -> None:
    moments = (10.0, 10.5, 11.0, 11.25, 12.0)
    assert [SAMPLES.value_at(TOKENS, moment) for moment in moments] == [100, 100, 100, 110, 140]
    for moment in (9.9, 12.1):
        with pytest.raises(ValueError, match=f"{TOKENS} was read from 10.0 to 12.0, not at {moment}"):
            SAMPLES.value_at(TOKENS, moment)


def test_metrics_of_one_name_are_summed_without_other_models(endpoint: Endpoint) -> None:
    found = metrics.read(endpoint.url)
    assert found == {**dict.fromkeys(NAMES, 1.0), "llama_requests_total": 3.0, "nv_cpu_memory_total_bytes": 25.0}


def test_readings_enclose_the_block(endpoint: Endpoint) -> None:
    with sampled(endpoint.url) as samples:
        began = time.time()
        assert endpoint.enough.wait(30)
        ended = time.time()
    assert samples.readings[-1][0] >= ended
    assert 0 < samples.growth(TOKENS, began, ended) <= endpoint.readings


def test_a_counter_that_is_lost_fails_the_measurement(endpoint: Endpoint) -> None:
    def measured() -> None:
        with sampled(endpoint.url):
            endpoint.names = NAMES[1:]
            assert endpoint.enough.wait(30)
            # The last reading has it again.
            endpoint.names = NAMES

    with pytest.raises(KeyError, match=NAMES[0]):
        measured()
