"""The endpoint in front of a real server under the config streaming, for clients as they are published."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from adjacent_ports import adjacent_ports
from end_to_end.clients.environments import installed
from end_to_end.clients.question import MODEL
from end_to_end.openai_endpoint import in_front_of
from end_to_end.plans import copy_repository
from end_to_end.servers import is_healthy, new_server, until
from frontend.endpoints import HOST, Endpoint
from triton_llama_openai.triton.engine_load import PAGE_SIZES
from triton_local.ports import choose_ports

PAGE = PAGE_SIZES["cpu"]
POLICIES = ("cache_aware", "kv_aware")
"""The router's: by the prompts that it has sent to an endpoint; by the pages that an endpoint has."""


class Worker(NamedTuple):
    """An endpoint with a Triton of its own, which publishes what its KV cache has."""

    endpoint: Endpoint
    kv_events_port: int


class Router(NamedTuple):
    """vLLM's router in front of two endpoints."""

    policy: str
    base_url: str
    endpoints: tuple[Endpoint, Endpoint]


@pytest.fixture(scope="session")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What a client of OpenAI's protocol is given."""
    # On a busy machine the tokens of a quick answer come in one event.
    repository = copy_repository(tmp_path_factory.mktemp("repository"), "slow_model")
    with (
        new_server("streaming", {"LLAMA_POOLING": "last"}, repository=repository) as server,
        in_front_of(server, stream_interval_ms=0) as endpoint,
    ):
        yield endpoint.base_url


@pytest.fixture(scope="session")
def workers() -> Iterator[tuple[Worker, Worker]]:
    """What is behind the routers."""
    first = adjacent_ports(4)
    ports = first, first + 2
    servers = [new_server("streaming", {"LLAMA_KV_EVENTS": f"tcp://{HOST}:{port}"}) for port in ports]
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        started = list(pool.map(stack.enter_context, servers))
        endpoints = [stack.enter_context(in_front_of(server)) for server in started]
        yield Worker(endpoints[0], ports[0]), Worker(endpoints[1], ports[1])


@pytest.fixture(scope="session")
def routers(workers: tuple[Worker, Worker], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Router]]:
    """One of each policy, in front of the same endpoints."""
    with ExitStack() as stack:
        yield {
            policy: stack.enter_context(_routing(policy, workers, tmp_path_factory.mktemp("router")))
            for policy in POLICIES
        }


@contextmanager
def _routing(policy: str, workers: tuple[Worker, Worker], home: Path) -> Iterator[Router]:
    ports = choose_ports(HOST, {"openai": 0, "metrics": 0})
    urls = [f"http://{HOST}:{worker.endpoint.port}" for worker in workers]
    options = ["--host", HOST, "--port", str(ports["openai"]), "--prometheus-port", str(ports["metrics"])]
    # By default cache_aware looks at the load from a difference of 64 requests on.
    options += ["--policy", policy, "--balance-abs-threshold", "4", "--worker-urls", *urls]
    if policy == "kv_aware":
        options += ["--kv-event-model", MODEL, "--kv-event-block-size", str(PAGE)]
        for url, (_, port) in zip(urls, workers, strict=True):
            options += ["--kv-event-source", f"{url}=tcp://{HOST}:{port}"]
            options += ["--kv-event-replay-source", f"{url}=tcp://{HOST}:{port + 1}"]
    program, log = installed("vllm_router") / "bin" / "vllm-router", home / "log"
    url = f"http://{HOST}:{ports['openai']}"
    with (
        log.open("wb") as written,
        subprocess.Popen(
            [program, *options], env={"HOME": str(home)}, stdout=written, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            until(lambda: is_healthy(f"{url}/health"), lambda: f"the router is healthy: {log.read_text()}")
            yield Router(policy, f"{url}/v1", (workers[0].endpoint, workers[1].endpoint))
        finally:
            process.terminate()
