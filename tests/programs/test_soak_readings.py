"""The settled metrics of a server are complete, however slowly they are passed on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import cast

import pytest
from engine.metrics import RecordingRegistry
from engine.scheduling import SECONDS
from llama_engine.engine import StepResult
from llama_engine.errors import InvalidRequest
from llama_engine.observability.metrics import Metric
from llama_engine.observability.stats import Stats
from triton_local.server import LocalTriton

from perf.metrics import total
from perf.soak.resources import settled

ROWS = 40


class _SlowRegistry(RecordingRegistry):
    """Slow at every observation, as on a busy machine."""

    def observe(self, metric: Metric, amount: float) -> None:
        time.sleep(0.01)
        super().observe(metric, amount)

    def text(self) -> str:
        """Return the series that the soak reads."""
        counts, levels = self.counts, self.levels
        return "\n".join(
            [
                f'llama_requests_total{{finish_reason="invalid"}} {counts["llama_requests_total invalid"]}',
                f"llama_generated_tokens_total {counts['llama_generated_tokens_total']}",
                f"llama_step_rows_sum {sum(self.observations['llama_step_rows'])}",
                f"llama_slots_in_use {levels.get('llama_slots_in_use', 0)}",
                f"llama_waiting_rows {levels.get('llama_waiting_rows', 0)}",
                "nv_inference_pending_request_count 0\n",
            ]
        )


@contextmanager
def _serving() -> Iterator[tuple[LocalTriton, Stats]]:
    """Give a server that has metrics and refuses every request, and its stats."""
    registry = _SlowRegistry()
    stats = Stats(registry, slots=8)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, registry.text().encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            stats.record_refused(InvalidRequest("text_input is empty"))
            self._answer(400, b"{}")

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        url = f"127.0.0.1:{http.server_port}"
        try:
            yield cast("LocalTriton", SimpleNamespace(http_url=url, metrics_url=url)), stats
        finally:
            http.shutdown()
            thread.join()
            stats.close(SECONDS)


@pytest.mark.parametrize("later", [0.0, 0.25], ids=["before", "meanwhile"])
def test_settled_metrics_contain_every_token_of_earlier_requests(later: float) -> None:
    """Rows whose last step is before the call, or a moment later, as after a client's disconnect."""
    with _serving() as (server, stats):

        def decode() -> None:
            for left in reversed(range(ROWS)):
                stats.record_step(StepResult(decoded=1, sampled=1), time.monotonic(), int(left > 0), 0)

        stats.record_load(1, 0)
        rows = threading.Timer(later, decode)
        rows.start()
        if not later:
            rows.join()
        found, sent = settled(server)
        rows.join()
    assert total(found, "llama_generated_tokens_total") == ROWS
    assert total(found, "llama_step_rows_sum") == ROWS
    assert total(found, "llama_requests_total", finish_reason="invalid") == sent
