"""Tritonservers for tests: a new one, the logs of those that run, and what Triton's HTTP API reports about one."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triton_local.process import Supervised
from triton_local.server import LocalTriton

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = ROOT / "models" / "pydoc-llama"

# On two busy cores, two threads that synchronize at every small matrix product are ten times slower than one.
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}

# The product's supervisor without its liveness probe: tests count requests, and the probe would send some.
SUPERVISED = Supervised(stuck_after=None)

PATIENCE_S = 60.0
"""How long `until` waits."""

_in_use: dict[str, LocalTriton] = {}


def new_server(
    variant: str = "default",
    environment: Mapping[str, str] | None = None,
    repository: Path | None = None,
    options: Sequence[str] = (),
    supervised: Supervised | None = SUPERVISED,
) -> LocalTriton:
    """Return a server of the embedded checkpoint on free ports, not started.

    environment: added to the tests' own. repository: None is the project's. options: for tritonserver. supervised: None
    starts Triton without a supervisor.
    """
    return LocalTriton(
        variant=variant,
        model_repository=repository,
        environment={**ENVIRONMENT, **(environment or {})},
        ready_timeout=240.0,
        extra_args=("--exit-timeout-secs=30", *options),
        supervised=supervised,
    )


@contextmanager
def in_use(name: str, server: LocalTriton) -> Iterator[None]:
    """Attach the server's log to every test that fails inside the block."""
    name = f"{name} on {server.http_url}"
    _in_use[name] = server
    try:
        yield
    finally:
        del _in_use[name]


def logs() -> dict[str, str]:
    """Return the last 60 lines of the log of every server in use, without the tables of options and backends."""
    lines = {name: server.log_text().splitlines() for name, server in _in_use.items()}
    return {name: "\n".join([line for line in log if line[:1] not in "+|"][-60:]) for name, log in lines.items()}


def get_json(server: LocalTriton, path: str) -> dict[str, Any]:
    """GET a path such as /v2/models/llama/config."""
    with urllib.request.urlopen(f"http://{server.http_url}{path}", timeout=30) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def facts(server: LocalTriton) -> str:
    """Return the log line with the dtypes of the loaded layers."""
    (line,) = [line for line in server.log_text().splitlines() if "llama: loaded " in line]
    return line


class Statistics:
    """Batches that Triton has executed since this object was made, from its statistics API."""

    def __init__(self, server: LocalTriton) -> None:
        self._server = server
        self._before = self._read()

    def batches(self) -> dict[int, int]:
        """Return how many batches of each size were executed; sizes with none are left out."""
        before, now = self._sizes(self._before), self._sizes(self._read())
        return {size: count - before.get(size, 0) for size, count in now.items() if count > before.get(size, 0)}

    def rows(self) -> int:
        """Return how many rows were executed."""
        return int(self._read()["inference_count"]) - int(self._before["inference_count"])

    def _read(self) -> dict[str, Any]:
        (statistics,) = get_json(self._server, "/v2/models/llama/stats")["model_stats"]
        assert isinstance(statistics, dict)
        return statistics

    @staticmethod
    def _sizes(statistics: dict[str, Any]) -> dict[int, int]:
        return {int(batch["batch_size"]): int(batch["compute_infer"]["count"]) for batch in statistics["batch_stats"]}


def is_decoupled(server: LocalTriton) -> bool:
    """Whether the live config is decoupled: Triton refuses /infer and unary gRPC calls for it."""
    live = get_json(server, "/v2/models/llama/config")
    return bool(live.get("model_transaction_policy", {}).get("decoupled", False))


def until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    """Poll a condition until it holds. Raises AssertionError with `what()` after PATIENCE_S seconds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen: {what()}"
        time.sleep(0.02)
