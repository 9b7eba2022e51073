"""Tritonservers for tests: a new one, what Triton's HTTP API reports about one, its processes and its end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil
import pytest
from frontend.endpoints import Endpoint, endpoint
from triton_local.server import LocalTriton
from triton_supervisor.process import model_processes

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = ROOT / "models" / "pydoc-llama"

ENVIRONMENT = {
    "LLAMA_MODEL": str(EMBEDDED),
    # On two busy cores, two threads that synchronize at every small matrix product are ten times slower than one.
    "OMP_NUM_THREADS": "1",
    # Tests count requests, and the supervisor's liveness probe would send some.
    "TRITON_STUCK_SECONDS": "0",
    "TRITON_GRACE_SECONDS": "30",
}

PATIENCE_S = 120.0
"""How long `until` waits."""

TIMEOUT_S = 240.0
"""For a response."""

HTTP = httpx.Client(
    timeout=TIMEOUT_S,
    # Triton waits for idle connections when it shuts down.
    headers={"Connection": "close"},
    limits=httpx.Limits(max_connections=None),
    trust_env=False,
)
"""Shared by all threads."""


def new_server(
    variant: str = "default",
    environment: Mapping[str, str] | None = None,
    repository: Path | None = None,
    options: Sequence[str] = (),
    ports: Mapping[str, int] = MappingProxyType({}),
) -> LocalTriton:
    """Return a server of the embedded checkpoint, not started.

    environment: added to the tests' own. repository: None is the project's. options: for tritonserver. ports: others
    are any free ones.
    """
    return LocalTriton(
        variant=variant,
        http_port=ports.get("http", 0),
        grpc_port=ports.get("grpc", 0),
        metrics_port=ports.get("metrics", 0),
        model_repository=repository,
        environment={**ENVIRONMENT, **(environment or {})},
        ready_timeout=240.0,
        extra_args=options,
        # A failed test shows what was logged while it ran, of this level and above.
        on_log_line=logging.getLogger(f"tritonserver.{variant}").warning,
    )


@contextmanager
def in_front_of(server: LocalTriton, **changes: object) -> Iterator[Endpoint]:
    """Serve the OpenAI endpoint in front of a server; `changes`: settings other than the defaults."""
    metrics = {"triton_metrics": server.metrics_address}
    with endpoint(int(server.grpc_address.rpartition(":")[2]), **metrics | changes) as served:
        yield served


def ports_of(server: LocalTriton) -> dict[str, int]:
    """Return the ports of a server, for another one in its place."""
    return {service: int(address.rpartition(":")[2]) for service, address in server.addresses.items()}


def get_json(server: LocalTriton, path: str) -> dict[str, Any]:
    """GET a path such as /v2/models/llama/config."""
    answer: dict[str, Any] = HTTP.get(f"http://{server.http_address}{path}").raise_for_status().json()
    return answer


def is_decoupled(server: LocalTriton) -> bool:
    """Whether the live config is decoupled: Triton refuses /infer and unary gRPC calls for it."""
    live = get_json(server, "/v2/models/llama/config")
    return bool(live.get("model_transaction_policy", {}).get("decoupled", False))


def model_process(server: LocalTriton, model: str = "llama") -> psutil.Process:
    """Return the process of one of the server's models."""

    def is_its(process: psutil.Process) -> bool:
        return f"/{model}/1/model.py" in Path(f"/proc/{process.pid}/cmdline").read_text()

    (process,) = filter(is_its, model_processes(server.pid))
    return process


def line_of_death(server: LocalTriton) -> str:
    """Wait until the server ends because its model is dead; return its one line about it."""
    until(lambda: server.exit_code is not None, lambda: "the server ends")
    assert server.wait() == 70
    (line,) = [line for line in server.log_text().splitlines() if line.startswith("triton_supervisor: ")]
    assert line.endswith("; the server ends with code 70")
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)
    return line.removeprefix("triton_supervisor: ")


def is_healthy(url: str) -> bool:
    """Return whether a probe is answered with 200."""
    try:
        return HTTP.get(url).status_code == 200
    except httpx.TransportError:
        return False


def until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    """Poll a condition until it holds. Raises AssertionError with `what()` after PATIENCE_S seconds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen: {what()}"
        time.sleep(0.02)
