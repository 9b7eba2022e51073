"""Real servers for the tests: one that is not started yet, the logs of those in use, and what can be read off one.

Which servers there are is `fleet.py`'s business, and what is asked of them `wires.py`'s and the tests'.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triton_local.server import LocalTriton
from triton_local.supervised import Supervised

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = ROOT / "models" / "pydoc-llama"

# The machine's idle cores are few and shared: two threads that wait for each other at every small matrix product are
# ten times slower beside anything else than one that doesn't wait.
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}

# Supervised as the product is, but for one thing: tests count requests, so nobody else may ask for tokens.
SUPERVISED = Supervised(stuck_after=None)

_in_use: dict[str, LocalTriton] = {}


def new_server(
    variant: str = "default",
    environment: Mapping[str, str] | None = None,
    repository: Path | None = None,
    options: Sequence[str] = (),
    supervised: Supervised | None = SUPERVISED,
) -> LocalTriton:
    """Return a server of the embedded checkpoint on free ports, to be started.

    environment: over the tests' own. repository: None is the project's. options: for tritonserver. supervised: None is
    Triton as it is.
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
    """Show the server's log with every test that fails meanwhile."""
    name = f"{name} on {server.http_url}"
    _in_use[name] = server
    try:
        yield
    finally:
        del _in_use[name]


def logs() -> dict[str, str]:
    """Return the end of the log of every server that is in use, by its name."""
    # Without the tables of options and backends: they are long, and the same every time.
    lines = {name: server.log_text().splitlines() for name, server in _in_use.items()}
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
