"""Tritonservers for tests: a new one, the logs of those that run, and what Triton's HTTP API reports about one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
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

PATIENCE_S = 60.0
"""How long `until` waits."""

TIMEOUT_S = 120.0
"""For a response."""

HTTP = httpx.Client(
    timeout=TIMEOUT_S,
    # Triton waits for idle connections when it shuts down.
    headers={"Connection": "close"},
    limits=httpx.Limits(max_connections=None),
    trust_env=False,
)
"""Shared by all threads."""

_in_use: dict[str, LocalTriton] = {}


def new_server(
    variant: str = "default",
    environment: Mapping[str, str] | None = None,
    repository: Path | None = None,
    options: Sequence[str] = (),
) -> LocalTriton:
    """Return a server of the embedded checkpoint, not started.

    environment: added to the tests' own. repository: None is the project's. options: for tritonserver.
    """
    return LocalTriton(
        variant=variant,
        model_repository=repository,
        environment={**ENVIRONMENT, **(environment or {})},
        ready_timeout=240.0,
        extra_args=options,
    )


@contextmanager
def in_use(name: str, server: LocalTriton) -> Iterator[LocalTriton]:
    """Attach the server's log to every test that fails inside the block."""
    name = f"{name} on {server.http_url}"
    _in_use[name] = server
    try:
        yield server
    finally:
        del _in_use[name]


def logs() -> dict[str, str]:
    """Return the last 60 lines of the log of every server in use, without the tables of options and backends."""
    lines = {name: server.log_text().splitlines() for name, server in _in_use.items()}
    return {name: "\n".join([line for line in log if line[:1] not in "+|"][-60:]) for name, log in lines.items()}


def get_json(server: LocalTriton, path: str) -> dict[str, Any]:
    """GET a path such as /v2/models/llama/config."""
    answer: dict[str, Any] = HTTP.get(f"http://{server.http_url}{path}").raise_for_status().json()
    return answer


def facts(server: LocalTriton) -> str:
    """Return the log line with the dtypes of the loaded layers."""
    (line,) = [line for line in server.log_text().splitlines() if "llama: loaded " in line]
    return line


class Statistics:
    """Batches that Triton has executed since this object was made, from its statistics API."""

    def __init__(self, server: LocalTriton) -> None:
        self._server = server
        self._rows, self._sizes = self._read()

    def batches(self) -> dict[int, int]:
        """Return how many batches of each size were executed; sizes with none are left out."""
        _, sizes = self._read()
        grown = {size: count - self._sizes.get(size, 0) for size, count in sizes.items()}
        return {size: count for size, count in grown.items() if count}

    def rows(self) -> int:
        """Return how many rows were executed."""
        return self._read()[0] - self._rows

    def _read(self) -> tuple[int, dict[int, int]]:
        (statistics,) = get_json(self._server, "/v2/models/llama/stats")["model_stats"]
        batches = statistics["batch_stats"]
        sizes = {int(batch["batch_size"]): int(batch["compute_infer"]["count"]) for batch in batches}
        return int(statistics["inference_count"]), sizes


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


def until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    """Poll a condition until it holds. Raises AssertionError with `what()` after PATIENCE_S seconds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen: {what()}"
        time.sleep(0.02)
