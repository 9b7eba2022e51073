"""vLLM's gauges on /metrics: a Triton's load, as its metrics page shows it."""

from __future__ import annotations

import socket
import time

import pytest
from client.peers import serve_page
from frontend.endpoints import HOST, endpoint, gauges
from frontend.fake_triton import FakeTriton
from llama_engine.kernels.cache_shape import CPU_PAGE_SIZE, GPU_PAGE_SIZE
from triton_llama.metrics_page import read_samples
from triton_llama_openai.triton_load import PAGE_SIZES, TritonLoad, triton_load

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
            f"llama_slots{{{own}}} 8\n"
            f'llama_kv_cache_pages{{{own},state="used"}} {used}\n'
            f'llama_kv_cache_pages{{{own},state="cached"}} 1\n'
            f'llama_kv_cache_pages{{{own},state="free"}} {PAGES - used - 1}\n'
            f"llama_generated_tokens_total{{{labels}}} 70\n"
            f"llama_prefix_cache_queries_total{{{labels}}} 60\n"
            f"llama_prefix_cache_hits_total{{{labels}}} 50\n"
            f'llama_draft_tokens_total{{{labels},source="text"}} 40\n'
            f'llama_accepted_draft_tokens_total{{{labels},source="text"}} 30\n'
            f'llama_model_info{{{own},computation="INT8, batch-invariant",device="cpu"}} 1\n'
        )


def test_the_gauges_are_the_engines_half_a_second_old_at_most(triton: FakeTriton) -> None:
    page = Page(1, 1, 1)
    info = 'vllm:cache_config_info{block_size="16",model_name="pydoc-llama",num_gpu_blocks="40"} 1.0'
    with serve_page(page.text) as address, endpoint(triton.port, triton_metrics=address) as served:
        triton.wait_for(lambda _: bool(gauges(served)))
        page.load = waiting, running, used = 3, 2, 10
        expected = used / PAGES, running, waiting + 2
        time.sleep(0.5)
        assert gauges(served) in ((), expected)
        triton.wait_for(lambda _: gauges(served) == expected)
        triton.wait_for(lambda _: info in served.http.get("/metrics").text.splitlines())


def test_without_metrics_one_line_says_that_gauges_lack(own: FakeTriton, caplog: pytest.LogCaptureFixture) -> None:
    with endpoint(own.port) as served:
        for _ in range(10):
            assert gauges(served) == ()
            time.sleep(0.1)
    assert caplog.text.count(f"the vllm: gauges of /metrics lack a Triton: {HOST}:{own.port + 1} has no metrics: ") == 1


def test_a_page_that_does_not_answer_delays_no_scrape(triton: FakeTriton) -> None:
    with (
        socket.create_server((HOST, 0)) as silent,
        endpoint(triton.port, triton_metrics=f"{HOST}:{silent.getsockname()[1]}") as served,
    ):
        began = time.monotonic()
        assert [gauges(served) for _ in range(100)] == [()] * 100
        # A hundred reads would take 30 s.
        assert time.monotonic() < began + 25


def test_instances_of_a_model_are_summed_and_other_models_left_out() -> None:
    page = Page(1, 3, 30)
    text = page.text() + page.text("llama_0_0_gpu1").partition("\n")[2] + page.text(model="other")
    gauges = 2 + 2, 6, 16, 60, 2, 2 * PAGES, CPU_PAGE_SIZE
    with serve_page(lambda: text) as address:
        assert triton_load(read_samples(address, "llama")) == TritonLoad(*gauges, 140, 120, 100, 80, 60)


def test_loads_of_several_tritons_are_summed_and_counters_are_each_ones_own(triton: FakeTriton) -> None:
    page = Page(running=3)
    line = 'vllm:generation_tokens_total{{engine="{}",model_name="pydoc-llama"}} 70.0'
    # On a busy machine a page may lack one: what was read is then too old.
    pages: list[str] = []

    def is_read(_: FakeTriton) -> bool:
        pages.append(served.http.get("/metrics").text)
        return line.format(1) in pages[-1] and line.format(2) in pages[-1]

    with (
        serve_page(page.text) as first,
        serve_page(page.text) as second,
        endpoint(triton.port, triton_metrics=f"{HOST}:3,{first}, {second}") as served,
    ):
        triton.wait_for(is_read)
        triton.wait_for(lambda _: gauges(served) == (0, 6, 4))
    assert 'engine="0"' not in pages[-1]
    for name, count in (
        ("prefix_cache_queries", 60),
        ("prefix_cache_hits", 50),
        ("spec_decode_num_draft_tokens", 40),
        ("spec_decode_num_accepted_tokens", 30),
    ):
        assert f'vllm:{name}_total{{engine="1",model_name="pydoc-llama"}} {count}.0' in pages[-1]
    assert 'llama_openai_kv_cache_pages{model_name="pydoc-llama",state="cached"} 2.0' in pages[-1]


def test_page_sizes_are_the_engines() -> None:
    assert PAGE_SIZES == {"cpu": CPU_PAGE_SIZE, "cuda": GPU_PAGE_SIZE}
