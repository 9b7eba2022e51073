"""The probe against a real Triton: idle, busy, with a full queue, and with the model's process stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from server.clients import ask, generate
from server.fleet import Fleet
from server.metrics import PENDING, Metrics, all_slots_taken
from triton_llama.health import Address, Limits, Verdict, healthy, live, ready
from triton_local.server import LocalTriton
from triton_supervisor.process_table import model_processes

SHORT = {"text_input": "Return a list of the", "max_tokens": 3, "min_tokens": 3, "temperature": 0.0}

PATIENT = Limits(timeout=60.0, step_age=600.0)
# No step is that young: what a step proves otherwise, a token has to prove, or one that comes while we wait.
UNBELIEVING = Limits(timeout=60.0, step_age=1e-6)


@pytest.fixture
def stopped(fleet: Fleet) -> Iterator[LocalTriton]:
    with fleet.server("stopped") as server:
        yield server


def _addresses(server: LocalTriton) -> tuple[Address, Address]:
    """Where it answers, and where its metrics are."""
    return Address.parse(server.http_url, 8000), Address.parse(server.metrics_url, 8002)


def _ask(server: LocalTriton, limits: Limits) -> dict[str, Verdict]:
    """What each probe says, in one line."""
    verdicts = {probe.__name__: probe(*_addresses(server), limits) for probe in (healthy, live, ready)}
    assert all("\n" not in verdict.reason for verdict in verdicts.values())
    return verdicts


@pytest.mark.parametrize("config", ["triton", "streaming"])
def test_an_idle_server_computes_nothing_or_more_than_a_token(config: str, request: pytest.FixtureRequest) -> None:
    server: LocalTriton = request.getfixturevalue(config)
    metrics = Metrics(server)
    for verdict in _ask(server, UNBELIEVING).values():
        assert verdict.ok, verdict
        assert verdict.reason.startswith("one token in ")
        assert "no metrics" not in verdict.reason
    metrics.wait_for(3, "llama_requests_total", finish_reason="length")
    assert metrics.grown("llama_generated_tokens_total") == 3
    for verdict in _ask(server, PATIENT).values():
        assert verdict.ok, verdict
        assert verdict.reason.startswith("a step ")


def test_a_server_with_more_work_than_it_takes_is_burdened_or_dead(narrow: LocalTriton) -> None:
    metrics = Metrics(narrow)
    with ThreadPoolExecutor() as pool:
        with all_slots_taken(narrow, metrics, slots=2) as lasting:
            others = [pool.submit(ask, narrow, generate, **SHORT)]
            metrics.wait(lambda now: now.now("llama_waiting_rows") == 1, "one waits in the model")
            others += [pool.submit(ask, narrow, generate, **SHORT) for _ in range(3)]
            metrics.wait(lambda now: now.now(PENDING) == 3, "the queue is full")
            for verdict in _ask(narrow, PATIENT).values():
                assert verdict.ok, verdict
                assert verdict.reason.startswith("a step ")
            verdict = healthy(*_addresses(narrow), UNBELIEVING)
            assert not any(call.done() for call in lasting), "or there was room in the queue"
        assert verdict.ok, verdict
        assert verdict.reason.startswith("HTTP 503: Exceeds maximum queue size, but a step ")
        assert all(other.result().num_output_tokens == 3 for other in others)


def test_a_process_that_stands_still_is_alive(stopped: LocalTriton) -> None:
    (process,) = model_processes(stopped.pid)
    metrics = Metrics(stopped)
    assert all(verdict.ok for verdict in _ask(stopped, UNBELIEVING).values())
    # A step still on its way to the metrics would be seen to come while it stands still; its rows are noted behind it.
    metrics.wait_for(3, "llama_step_rows_count")
    os.kill(process.pid, signal.SIGSTOP)
    try:
        verdicts = _ask(stopped, Limits(timeout=2.0, step_age=1e-6))
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert not any(verdict.ok for verdict in verdicts.values()), verdicts
    assert all(verdict.reason.endswith(" ago") for verdict in verdicts.values()), verdicts
