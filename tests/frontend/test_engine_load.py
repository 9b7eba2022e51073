"""vLLM's gauges on /metrics: the engine's load, as Triton's metrics page shows it."""

from __future__ import annotations

import logging
import math
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from frontend.endpoints import HOST, Endpoint, endpoint, gauges
from frontend.fake_triton import FakeTriton
from llama_engine.kernels.cache_shape import CPU_PAGE_SIZE, GPU_PAGE_SIZE
from triton_llama_openai.metrics import EngineLoad
from triton_llama_openai.triton.engine_load import PAGE_SIZES, engine_load

PAGES = 40


class Page:
    """A metrics page of two requests in Triton's queue, and of this load."""

    def __init__(self, waiting: int = 0, running: int = 0, used: int = 0) -> None:
        self.load = waiting, running, used

    def text(self, instance: str = "llama_0_0", model: str = "llama") -> str:
        """Return the series of one instance."""
        labels = f'model="{model}",version="1"'
        waiting, running, used = self.load
        own = f'{labels},model_instance="{instance}"'
        return (
            f"nv_inference_pending_request_count{{{labels}}} 2\n"
            f"llama_waiting_requests{{{own}}} {waiting}\n"
            f"llama_slots_in_use{{{own}}} {running}\n"
            f'llama_kv_cache_pages{{{own},state="used"}} {used}\n'
            f'llama_kv_cache_pages{{{own},state="cached"}} 0\n'
            f'llama_kv_cache_pages{{{own},state="free"}} {PAGES - used}\n'
            f'llama_model_info{{{own},computation="INT8, batch-invariant",device="cpu"}} 1\n'
        )


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, page: Page, *connection: object) -> None:
        self._page = page
        super().__init__(*connection)  # type: ignore[arg-type]  # what the server passes

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self._page.text().encode())

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def served_page(page: Page) -> Iterator[str]:
    """Serve a page; yield its address."""
    with ThreadingHTTPServer((HOST, 0), partial(_Handler, page)) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"{HOST}:{server.server_port}"
        server.shutdown()
        thread.join()


def until_read(served: Endpoint) -> None:
    """Wait until the endpoint has read the page."""
    deadline = time.monotonic() + 20
    while not gauges(served):
        assert time.monotonic() < deadline, "there are no gauges"
        time.sleep(0.01)


def test_the_gauges_are_the_engines_of_the_last_half_second(triton: FakeTriton) -> None:
    page, chance = Page(), random.Random(7)
    with served_page(page) as address, endpoint(triton.port, triton_metrics=address) as served:
        until_read(served)
        # The engine's loads, with the time at which each ended.
        loads = [(math.inf, page.load)]
        seen = set()
        for _ in range(500):
            loads[-1] = time.monotonic(), page.load
            page.load = chance.randrange(9), chance.randrange(9), chance.randrange(PAGES)
            loads.append((math.inf, page.load))
            time.sleep(chance.random() * 0.01)
            asked = time.monotonic()
            usage, running, waiting = gauges(served)
            load = waiting - 2, running, round(usage * PAGES)
            assert load in {load for ended, load in loads if ended >= asked - 0.5}
            seen.add(load)
    assert len(seen) > 10


def test_the_caches_pages_are_labels(triton: FakeTriton) -> None:
    with served_page(Page()) as address, endpoint(triton.port, triton_metrics=address) as served:
        until_read(served)
        info = 'vllm:cache_config_info{block_size="16",model_name="pydoc-llama",num_gpu_blocks="40"} 1.0'
        assert info in served.http.get("/metrics").text.splitlines()


def test_without_triton_metrics_there_are_no_gauges_and_one_line_says_so(
    triton: FakeTriton, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "triton_llama_openai")
    with endpoint(triton.port) as served:
        for _ in range(10):
            assert gauges(served) == ()
            time.sleep(0.1)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"the vllm: gauges of /metrics are without http://{HOST}:{triton.port + 1}/metrics, which")


def test_a_page_that_does_not_answer_delays_no_scrape(triton: FakeTriton) -> None:
    with (
        socket.create_server((HOST, 0)) as silent,
        endpoint(triton.port, triton_metrics=f"{HOST}:{silent.getsockname()[1]}") as served,
    ):
        began = time.monotonic()
        assert [gauges(served) for _ in range(10)] == [()] * 10
        # Ten reads would take 3 s.
        assert time.monotonic() < began + 1


def test_instances_of_a_model_are_summed_and_other_models_left_out() -> None:
    page = Page(1, 3, 30)
    text = page.text() + page.text("llama_0_0_gpu1").partition("\n")[2] + page.text(model="other")
    assert engine_load(text, "llama") == EngineLoad(2 + 2, 6, 60, 2 * PAGES, CPU_PAGE_SIZE)


def test_several_tritons_are_summed_without_those_that_cannot_be_read(triton: FakeTriton) -> None:
    page = Page(running=3)
    with (
        served_page(page) as first,
        served_page(page) as second,
        endpoint(triton.port, triton_metrics=f"{first},{second}, {HOST}:3") as served,
    ):
        deadline = time.monotonic() + 20
        while gauges(served) != (0, 6, 4):
            assert time.monotonic() < deadline, gauges(served)
            time.sleep(0.01)


def test_page_sizes_are_the_engines() -> None:
    assert PAGE_SIZES == {"cpu": CPU_PAGE_SIZE, "cuda": GPU_PAGE_SIZE}
