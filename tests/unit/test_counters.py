"""Counters between two moments: interpolation, and a metrics endpoint that answers or lacks one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from perf import metrics
from perf.bench.counters import NAMES, Samples, sampled

TOKENS = "llama_generated_tokens_total"
SAMPLES = Samples([(10.0, {TOKENS: 100.0}), (11.0, {TOKENS: 100.0}), (12.0, {TOKENS: 140.0})])


class Endpoint(BaseHTTPRequestHandler):
    """A metrics endpoint whose counters grow by one with every reading, beside another model's."""

    names: ClassVar[tuple[str, ...]] = NAMES
    read: ClassVar[int] = 0
    enough: ClassVar[threading.Event] = threading.Event()

    def do_GET(self) -> None:
        Endpoint.read += 1
        lines = [f'{name}{{model="llama",version="1"}} {Endpoint.read}' for name in Endpoint.names]
        others = [f'{name}{{model="another",version="1"}} 1000000' for name in NAMES]
        reasons = [f'llama_requests_total{{finish_reason="{reason}",model="llama"}} 1.5e0' for reason in ("a", "b")]
        body = "\n".join(["# HELP what it is", *lines, *others, *reasons, "nv_cpu_memory_total_bytes 25", ""]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if Endpoint.read >= 4 or Endpoint.names != NAMES:
            Endpoint.enough.set()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    Endpoint.names, Endpoint.read, Endpoint.enough = NAMES, 0, threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_counter_is_interpolated_between_two_readings() -> None:
    moments = (10.0, 10.5, 11.0, 11.25, 12.0)
    assert [SAMPLES.value_at(TOKENS, moment) for moment in moments] == [100, 100, 100, 110, 140]


@pytest.mark.parametrize("moment", [9.9, 12.1])
def test_a_moment_outside_of_the_readings_is_refused(moment: float) -> None:
    with pytest.raises(ValueError, match=f"{TOKENS} was read from 10.0 to 12.0, not at {moment}"):
        SAMPLES.value_at(TOKENS, moment)


def test_metrics_of_one_name_are_summed_without_other_models(url: str) -> None:
    found = metrics.read(url)
    assert found == {**dict.fromkeys(NAMES, 1.0), "llama_requests_total": 3.0, "nv_cpu_memory_total_bytes": 25.0}


def test_readings_enclose_the_block(url: str) -> None:
    with sampled(url) as samples:
        began = time.time()
        assert Endpoint.enough.wait(30)
        ended = time.time()
    assert samples.readings[-1][0] >= ended
    assert 0 < samples.growth(TOKENS, began, ended) <= Endpoint.read


@pytest.mark.parametrize("missing_at_once", [True, False])
def test_a_counter_that_is_missing_fails_the_measurement(url: str, missing_at_once: bool) -> None:
    def measured() -> None:
        with sampled(url):
            assert not missing_at_once, "a server without the counter was sampled"
            Endpoint.names = NAMES[1:]
            assert Endpoint.enough.wait(30)

    if missing_at_once:
        Endpoint.names = NAMES[1:]
    with pytest.raises(KeyError, match=NAMES[0]):
        measured()
