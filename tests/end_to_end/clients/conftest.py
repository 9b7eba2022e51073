"""The endpoint in front of a real server under the config streaming, for clients as they are published."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest
from end_to_end.clients.environments import installed
from end_to_end.openai_endpoint import in_front_of
from end_to_end.plans import copy_repository
from end_to_end.servers import new_server, until
from frontend.endpoints import HOST, Endpoint
from triton_local.ports import choose_ports
from triton_local.server import LocalTriton


class Router(NamedTuple):
    """vLLM's router in front of two endpoints, each with a Triton of its own."""

    base_url: str
    endpoints: tuple[Endpoint, Endpoint]


@pytest.fixture(scope="session")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What a client of OpenAI's protocol is given."""
    # On a busy machine the tokens of a quick answer come in one event.
    repository = copy_repository(tmp_path_factory.mktemp("repository"), "slow_model")
    with (
        new_server("streaming", repository=repository) as server,
        in_front_of(server, stream_interval_ms=0) as endpoint,
    ):
        yield endpoint.base_url


@pytest.fixture(scope="session")
def router(streaming: LocalTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """It sends a prompt where most of its beginning was sent."""
    home = tmp_path_factory.mktemp("router")
    ports = choose_ports(HOST, {"openai": 0, "metrics": 0})
    with new_server("streaming") as other, in_front_of(streaming) as first, in_front_of(other) as second:
        workers = [f"http://{HOST}:{endpoint.port}" for endpoint in (first, second)]
        options = ["--host", HOST, "--port", str(ports["openai"]), "--prometheus-port", str(ports["metrics"])]
        options += ["--policy", "cache_aware", "--worker-urls", *workers]
        program, log = installed("vllm_router") / "bin" / "vllm-router", home / "log"
        url = f"http://{HOST}:{ports['openai']}"
        with (
            log.open("wb") as written,
            subprocess.Popen(
                [program, *options], env={"HOME": str(home)}, stdout=written, stderr=subprocess.STDOUT
            ) as process,
        ):
            try:
                until(lambda: _is_healthy(url), lambda: f"the router is healthy: {log.read_text()}")
                yield Router(f"{url}/v1", (first, second))
            finally:
                process.terminate()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.ConnectError:
        return False
