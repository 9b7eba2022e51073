"""Real servers for the tests, and their logs for whoever asks why a test failed.

Knows how a server is started and which ones run; what is asked of them is `wires.py`'s and the tests' business.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triton_local.server import LocalTriton

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = ROOT / "models" / "pydoc-llama"

# The machine's idle cores are few and shared: two threads that wait for each other at every small matrix product are
# ten times slower beside anything else than one that doesn't wait.
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}

_running: dict[str, LocalTriton] = {}


@contextmanager
def serve(
    variant: str = "default",
    environment: Mapping[str, str] | None = None,
    ports: tuple[int, int, int] = (0, 0, 0),
    repository: Path | None = None,
    options: Sequence[str] = (),
) -> Iterator[LocalTriton]:
    """Run a server of the embedded checkpoint, ready on entry; its log is shown with every test that fails meanwhile.

    environment: over the tests' own. ports: HTTP, gRPC, metrics; 0 is any free one. repository: None is the project's.
    options: for tritonserver.
    """
    http, grpc, metrics = ports
    server = LocalTriton(
        variant=variant,
        http_port=http,
        grpc_port=grpc,
        metrics_port=metrics,
        model_repository=repository,
        environment={**ENVIRONMENT, **(environment or {})},
        ready_timeout=240.0,
        # A client that keeps its connection open would hold a test's server up for all of it.
        extra_args=("--exit-timeout-secs=30", *options),
    )
    with server:
        name = f"{variant} on {server.http_url}"
        _running[name] = server
        try:
            yield server
        finally:
            del _running[name]


def logs() -> dict[str, str]:
    """Return the end of the log of every server that runs, by its name."""
    # Without the tables of options and backends: they are long, and the same every time.
    lines = {name: server.log_text().splitlines() for name, server in _running.items()}
    return {name: "\n".join([line for line in log if line[:1] not in "+|"][-60:]) for name, log in lines.items()}


def get_json(server: LocalTriton, path: str) -> dict[str, Any]:
    """Return the JSON that the server's HTTP service has at `path`, such as /v2/models/llama/config."""
    with urllib.request.urlopen(f"http://{server.http_url}{path}", timeout=30) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def facts(server: LocalTriton) -> str:
    """Return the log line that says what was loaded, read back from the model."""
    (line,) = [line for line in server.log_text().splitlines() if "llama: loaded " in line]
    return line


class Statistics:
    """What Triton has executed since this was made, from its statistics API."""

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

    def executions(self) -> int:
        """Return how many times the model was executed."""
        return int(self._read()["execution_count"]) - int(self._before["execution_count"])

    def _read(self) -> dict[str, Any]:
        (statistics,) = get_json(self._server, "/v2/models/llama/stats")["model_stats"]
        assert isinstance(statistics, dict)
        return statistics

    @staticmethod
    def _sizes(statistics: dict[str, Any]) -> dict[int, int]:
        return {int(batch["batch_size"]): int(batch["compute_infer"]["count"]) for batch in statistics["batch_stats"]}


def is_decoupled(server: LocalTriton) -> bool:
    """Return whether the config that runs answers in pieces; Triton has no unary calls for it."""
    live = get_json(server, "/v2/models/llama/config")
    return bool(live.get("model_transaction_policy", {}).get("decoupled", False))
