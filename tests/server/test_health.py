"""Health probes against an idle server, a full queue, a hanging step, and a model process under SIGSTOP."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server.clients import ask, generate
from server.metrics import PENDING, Metrics, all_slots_taken
from server.servers import model_process
from triton_local.server import LocalTriton
from triton_supervisor.health import Limits, Verdict, healthy, live, ready
from triton_supervisor.triton import Address

SHORT = {"text_input": "Return a list of the", "max_tokens": 3, "min_tokens": 3, "temperature": 0.0}

PATIENT = Limits(timeout=60.0, step_age=600.0)
# No step is that recent: the probe has to generate a token, or see a step while it waits.
STRICT = Limits(timeout=60.0, step_age=1e-6)

HELD = "held"
"""The file of slow_model.py beside the program."""


PROBES = 3
SHORT_OF_TIME = Limits(timeout=0.5, step_age=1e-6)


def _addresses(server: LocalTriton) -> tuple[Address, Address]:
    """HTTP and metrics addresses."""
    return Address.parse(server.http_url), Address.parse(server.metrics_url)


def _ask(server: LocalTriton, limits: Limits) -> dict[str, Verdict]:
    """Each probe's verdict."""
    verdicts = {probe.__name__: probe(*_addresses(server), limits) for probe in (healthy, live, ready)}
    assert all("\n" not in verdict.reason for verdict in verdicts.values())
    return verdicts


def test_an_idle_server_proves_health_with_one_token_or_a_recent_step(either: LocalTriton) -> None:
    metrics = Metrics(either)
    for verdict in _ask(either, STRICT).values():
        assert verdict.ok, verdict
        assert verdict.reason.startswith("one token in ")
        assert "no metrics" not in verdict.reason
    metrics.wait_for(3, "llama_requests_total", finish_reason="length")
    assert metrics.grown("llama_generated_tokens_total") == 3
    for verdict in _ask(either, PATIENT).values():
        assert verdict.ok, verdict
        assert verdict.reason.startswith("a step ")


@pytest.mark.parametrize("narrow", ["narrow_default"], indirect=True)
def test_a_server_with_a_full_queue_is_healthy(narrow: LocalTriton, metrics: Metrics) -> None:
    with ThreadPoolExecutor() as pool:
        with all_slots_taken(narrow, metrics, slots=2) as lasting:
            others = [pool.submit(ask, narrow, generate, **SHORT)]
            metrics.wait(lambda now: now.now("llama_waiting_rows") == 1, "one waits in the model")
            others += [pool.submit(ask, narrow, generate, **SHORT) for _ in range(3)]
            metrics.wait(lambda now: now.now(PENDING) == 3, "the queue is full")
            for verdict in _ask(narrow, PATIENT).values():
                assert verdict.ok, verdict
                assert verdict.reason.startswith("a step ")
            verdict = healthy(*_addresses(narrow), STRICT)
            assert not any(call.done() for call in lasting), "or there was room in the queue"
        assert verdict.ok, verdict
        assert verdict.reason.startswith("requests wait, but a step ")
        assert all(other.result().num_output_tokens == 3 for other in others)


@pytest.mark.long
def test_probes_leave_one_request_at_most_with_a_stuck_model(stuck: LocalTriton) -> None:
    """What they leave is computed once the model goes on: it costs tokens, and slots of clients."""
    metrics = Metrics(stuck)
    command = Path(f"/proc/{model_process(stuck).pid}/cmdline").read_text().split("\0")
    (program,) = [Path(word) for word in command if word.endswith("/1/model.py")]
    held = program.with_name(HELD)
    held.touch()
    try:
        assert not healthy(*_addresses(stuck), SHORT_OF_TIME).ok
        metrics.wait_for_slots(1)
        verdicts = [live(*_addresses(stuck), SHORT_OF_TIME) for _ in range(PROBES)]
        assert {verdict.reason for verdict in verdicts} == {"requests wait, no step yet"}
    finally:
        # A stuck model delays the end.
        held.unlink()
    assert ask(stuck, generate, **SHORT).num_output_tokens == 3
    metrics.wait(Metrics.idle, "all are answered")
    # The first probe's and the client's.
    metrics.wait_for(2, "llama_requests_total", finish_reason="length")
    assert metrics.now(PENDING) == 0
