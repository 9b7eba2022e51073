"""The endpoint in front of a real server under the config streaming, for clients as they are published."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest
from adjacent_ports import adjacent_ports
from end_to_end.clients.environments import installed
from end_to_end.clients.question import MODEL
from end_to_end.plans import copy_repository
from end_to_end.servers import in_front_of, is_healthy, new_server, ports_of, until
from frontend.endpoints import HOST, Endpoint
from triton_llama_openai.triton_load import PAGE_SIZES
from triton_local.ports import choose_ports
from triton_local.server import LocalTriton

PAGE = PAGE_SIZES["cpu"]


class Replica(NamedTuple):
    """A Triton, and the first of two ports where it publishes what its KV cache has."""

    triton: LocalTriton
    kv_events_port: int


NewReplica = Callable[..., Replica]


class Router(NamedTuple):
    """vLLM's router in front of two endpoints."""

    base_url: str
    endpoints: list[Endpoint]


@pytest.fixture(scope="session")
def new_replica(tmp_path_factory: pytest.TempPathFactory) -> NewReplica:
    """Make a replica, not started; `previous` is one that has ended, whose ports it takes."""
    # On a busy machine the tokens of a quick answer come in one event.
    repository = copy_repository(tmp_path_factory.mktemp("repository"), "slow_model")

    def new(previous: Replica | None = None) -> Replica:
        port = previous.kv_events_port if previous else adjacent_ports(2)
        ports = ports_of(previous.triton) if previous else {}
        settings = {"LLAMA_POOLING": "last", "LLAMA_KV_EVENTS": f"tcp://{HOST}:{port}"}
        return Replica(new_server("streaming", settings, repository, ports=ports), port)

    return new


@pytest.fixture(scope="session")
def replicas(new_replica: NewReplica) -> Iterator[list[Replica]]:
    """Two running replicas."""
    with ExitStack() as stack:
        started = []
        for _ in range(2):
            started.append(new_replica())
            stack.enter_context(started[-1].triton)
        yield started


@pytest.fixture(scope="session")
def endpoints(replicas: list[Replica]) -> Iterator[list[Endpoint]]:
    """An OpenAI endpoint in front of each replica."""
    with ExitStack() as stack:
        yield [stack.enter_context(in_front_of(replica.triton, stream_interval_ms=0)) for replica in replicas]


@pytest.fixture(scope="session")
def base_url(endpoints: list[Endpoint]) -> str:
    """The base URL of the first endpoint, for OpenAI clients."""
    return endpoints[0].base_url


@pytest.fixture(scope="session")
def router(
    replicas: list[Replica], endpoints: list[Endpoint], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Router]:
    """vLLM's router, which gets the KV events of each replica."""
    home = tmp_path_factory.mktemp("router")
    ports = choose_ports(HOST, {"openai": 0, "metrics": 0})
    urls = [f"http://{HOST}:{endpoint.port}" for endpoint in endpoints]
    options = ["--host", HOST, "--port", str(ports["openai"]), "--prometheus-port", str(ports["metrics"])]
    options += ["--policy", "kv_aware", "--worker-urls", *urls]
    options += ["--kv-event-model", MODEL, "--kv-event-block-size", str(PAGE)]
    for url, (_, port) in zip(urls, replicas, strict=True):
        options += ["--kv-event-source", f"{url}=tcp://{HOST}:{port}"]
        options += ["--kv-event-replay-source", f"{url}=tcp://{HOST}:{port + 1}"]
    command = [f"{installed('vllm_router')}/bin/vllm-router", *options]
    url, log = f"http://{HOST}:{ports['openai']}", home / "log"
    with (
        log.open("wb") as written,
        subprocess.Popen(command, env={"HOME": str(home)}, stdout=written, stderr=subprocess.STDOUT) as process,
    ):
        try:
            until(lambda: is_healthy(f"{url}/health"), lambda: f"the router is healthy: {log.read_text()}")
            yield Router(f"{url}/v1", endpoints)
        finally:
            process.terminate()
