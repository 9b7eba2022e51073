"""The health probe against an idle server and a full queue."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from end_to_end.metrics import PENDING, Metrics, all_slots_taken
from end_to_end.wires import ask, generate
from triton_local.server import LocalTriton
from triton_supervisor.health import Limits, healthy
from triton_supervisor.triton import Address

SHORT = {"text_input": "Return a list of the", "max_tokens": 3, "min_tokens": 3, "temperature": 0.0}

PATIENT = Limits(timeout=60.0, step_age=600.0)
# No step is that recent: the probe has to generate a token.
STRICT = Limits(timeout=60.0, step_age=1e-6)


def _addresses(server: LocalTriton) -> tuple[Address, Address]:
    """HTTP and metrics addresses."""
    return Address.parse(server.http_url), Address.parse(server.metrics_url)


def test_an_idle_server_proves_health_with_one_token_or_a_recent_step(either: LocalTriton) -> None:
    metrics = Metrics(either)
    verdict = healthy(*_addresses(either), STRICT)
    assert verdict.ok, verdict
    assert verdict.reason.startswith("one token in ")
    assert "no metrics" not in verdict.reason
    metrics.wait_for(1, "llama_requests_total", finish_reason="length")
    assert metrics.grown("llama_generated_tokens_total") == 1
    verdict = healthy(*_addresses(either), PATIENT)
    assert verdict.ok, verdict
    assert verdict.reason.startswith("a step ")


@pytest.mark.parametrize("narrow", ["narrow_default"], indirect=True)
def test_a_server_with_a_full_queue_is_healthy(narrow: LocalTriton, metrics: Metrics) -> None:
    with ThreadPoolExecutor() as pool:
        with all_slots_taken(narrow, metrics, slots=2) as lasting:
            others = [pool.submit(ask, narrow, generate, **SHORT)]
            metrics.wait(lambda now: now.now("llama_waiting_requests") == 1, "one waits in the model")
            others += [pool.submit(ask, narrow, generate, **SHORT) for _ in range(3)]
            metrics.wait(lambda now: now.now(PENDING) == 3, "the queue is full")
            verdict = healthy(*_addresses(narrow), PATIENT)
            assert not any(call.done() for call in lasting), "or there was room in the queue"
        assert verdict.ok, verdict
        assert verdict.reason.startswith("a step ")
        assert all(other.result().num_output_tokens == 3 for other in others)
