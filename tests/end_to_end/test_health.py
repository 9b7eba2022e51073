"""The health probe against a model that only embeds; compose/test_compose_up.py has one that generates."""

from __future__ import annotations

from pathlib import Path

import pytest
from end_to_end.metrics import Metrics
from end_to_end.servers import new_server, until
from engine.families import save_base_model, save_family
from triton_supervisor.health import Limits, healthy
from triton_supervisor.triton import Address


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
        verdict = healthy(Address.parse(server.http_address), None, Limits(timeout=60.0))
    assert verdict.ok, verdict
    assert verdict.reason.startswith("one embedding in ")
