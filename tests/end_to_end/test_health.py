"""The health probe against an idle server; test_queue.py has a full one."""

from __future__ import annotations

from end_to_end.metrics import Metrics
from triton_local.server import LocalTriton
from triton_supervisor.health import Limits, healthy
from triton_supervisor.triton import Address


def test_an_idle_server_proves_health_with_one_token_or_a_recent_step(either: LocalTriton) -> None:
    http, metrics_page = Address.parse(either.http_url), Address.parse(either.metrics_url)
    metrics = Metrics(either)
    # No step is that recent: the probe has to generate a token.
    verdict = healthy(http, metrics_page, Limits(timeout=60.0, step_age=1e-6))
    assert verdict.ok, verdict
    assert verdict.reason.startswith("one token in ")
    assert "no metrics" not in verdict.reason
    metrics.wait_for(1, "llama_requests_total", finish_reason="length")
    assert metrics.grown("llama_generated_tokens_total") == 1
    verdict = healthy(http, metrics_page, Limits(timeout=60.0, step_age=600.0))
    assert verdict.ok, verdict
    assert verdict.reason.startswith("a step ")
