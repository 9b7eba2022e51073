"""The health probe against an idle server; test_queue.py has a full one."""

from __future__ import annotations

from pathlib import Path

import pytest
from end_to_end.metrics import Metrics
from end_to_end.servers import new_server, until
from engine.families import save_base_model, save_family
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
    metrics.wait_for(1, "llama_generated_tokens_total")
    # Triton gets gauges after counters.
    metrics.wait(lambda now: now.grown("llama_last_step_timestamp_seconds") > 0, "the step's time is there")
    verdict = healthy(http, metrics_page, Limits(timeout=60.0, step_age=600.0))
    assert verdict.ok, verdict
    assert verdict.reason.startswith("a step ")


@pytest.mark.long
def test_an_idle_model_without_a_head_lives_past_its_stuck_time(tmp_path: Path) -> None:
    model = save_base_model(tmp_path / "base", save_family(tmp_path / "mistral", "mistral"))
    settings = {"LLAMA_MODEL": str(model), "LLAMA_POOLING": "mean", "TRITON_STUCK_SECONDS": "12"}
    with new_server("streaming", settings) as server:
        metrics = Metrics(server)

        def embeddings() -> float:
            assert server.exit_code is None, server.log_text()
            return metrics.grown("llama_requests_total", finish_reason="stop")

        # The supervisor asks for one only once the last step is a quarter of that time ago.
        until(lambda: embeddings() > 5, lambda: "the supervisor's probes")
        verdict = healthy(Address.parse(server.http_url), None, Limits(timeout=60.0))
    assert verdict.ok, verdict
    assert verdict.reason.startswith("one embedding in ")
