"""Every metric is on Triton's endpoint under the model's labels, and has the right value after a known load."""

from __future__ import annotations

import time
from functools import partial

import pytest
from llama_engine.observability.metrics import METRICS, REASONS
from server.clients import Refusal, ask, at_once, generate
from server.metrics import Metrics, text
from server.servers import is_decoupled
from server.streams import STREAM_WIRES, Call
from triton_local.server import LocalTriton

TOKENS = 6
"""Of the prompt, the beginning-of-text token included."""

LABELS = {"model": "llama", "version": "1"}


def _request(limit: int) -> dict[str, object]:
    return {"text_input": "Return a list of the", "max_tokens": limit, "min_tokens": limit, "temperature": 0.0}


def test_every_metric_is_on_the_endpoint_with_help_type_and_labels(narrow: LocalTriton, metrics: Metrics) -> None:
    ask(narrow, generate, **_request(2))
    page, series = text(narrow), metrics.read()
    for metric in METRICS:
        assert f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n" in page
        for value in metric.values:
            labels = LABELS | ({metric.label: value} if metric.label else {})
            if metric.kind != "histogram":
                assert (metric.name, frozenset(labels.items())) in series
                continue
            bounds = {
                float(dict(its)["le"])
                for name, its in series
                if name == f"{metric.name}_bucket" and {*labels.items()} <= its
            }
            assert bounds == {*metric.buckets, float("inf")}
            assert {(f"{metric.name}_{part}", frozenset(labels.items())) for part in ("sum", "count")} <= {*series}


def test_gauges_are_labelled_with_their_instance(narrow: LocalTriton) -> None:
    """Otherwise the last of several instances would overwrite the others; counters of all instances add up."""
    gauges = {metric.name for metric in METRICS if metric.kind == "gauge"}
    series = [line.partition("{") for line in text(narrow).splitlines() if line.startswith("llama_")]
    assert {name for name, _, labels in series if 'model_instance="llama_0_0"' in labels} == gauges


def test_a_single_request_is_counted_exactly(narrow: LocalTriton, metrics: Metrics) -> None:
    began = time.time()
    answer = ask(narrow, generate, **_request(7))
    assert (answer.num_input_tokens, answer.num_output_tokens) == (TOKENS, 7)
    # Triton gets metrics one after another, this one last.
    metrics.wait_for(6, "llama_inter_token_latency_seconds_count")
    expected = {
        "llama_prompt_tokens_total": TOKENS,
        "llama_generated_tokens_total": 7,
        "llama_step_rows_count": 7,
        "llama_step_rows_sum": 7,
        "llama_step_prefill_tokens_count": 1,
        "llama_step_prefill_tokens_sum": TOKENS,
        "llama_time_to_first_token_seconds_count": 1,
        "llama_inter_token_latency_seconds_count": 6,
        "llama_request_latency_seconds_count": 1,
        "llama_queue_time_seconds_count": 1,
        "llama_step_errors_total": 0,
        "llama_cancellations_total": 0,
    }
    assert {name: metrics.grown(name) for name in expected} == expected
    reasons = {reason: metrics.grown("llama_requests_total", finish_reason=reason) for reason in REASONS}
    assert reasons == dict.fromkeys(REASONS, 0) | {"length": 1}
    first, between, whole, queued = (
        metrics.grown(f"llama_{name}_seconds_sum")
        for name in ("time_to_first_token", "inter_token_latency", "request_latency", "queue_time")
    )
    assert 0 <= queued <= first <= whole
    assert first + between == pytest.approx(whole, rel=0.05)
    assert began <= metrics.now("llama_last_step_timestamp_seconds") <= time.time()
    assert metrics.now("llama_slots") == 2


def test_a_mixed_load_is_counted_exactly(narrow: LocalTriton, metrics: Metrics) -> None:
    """More rows than slots, and every finish reason but an internal error."""
    # No more at once than the queue holds.
    limits = [3, 8, 1]
    at_once([partial(ask, narrow, generate, **_request(limit)) for limit in limits])
    known = ask(narrow, generate, **_request(12))
    stopped = ask(narrow, generate, **_request(12) | {"min_tokens": 0, "stop_words": [known.text[-1]]})
    assert stopped.finish_reason == "stop"
    for bad in ({"max_tokens": 0}, {"temperature": 9.0}, {"temprature": 1.0}):
        assert isinstance(generate(narrow, _request(4) | bad), Refusal)
    streams = STREAM_WIRES if is_decoupled(narrow) else ()
    assert [wire(narrow, _request(9)).whole.num_output_tokens for wire in streams] == [9] * len(streams)
    # Otherwise the slot seen in use below might be the last row's, and the call cancelled before it runs.
    metrics.wait_for(len(limits) + 2 + len(streams), "llama_request_latency_seconds_count")
    metrics.wait(Metrics.idle, "all have ended")
    with Call(narrow, _request(500)) as call:
        metrics.wait(lambda now: now.now("llama_slots_in_use") == 1, "it runs")
        call.cancel()
        metrics.wait_for(1, "llama_cancellations_total")
    metrics.wait(Metrics.idle, "all have ended")
    completed = len(limits) + 1 + len(streams)
    rows = completed + 2
    # Triton gets metrics one after another, this one of the cancelled row last.
    metrics.wait_for(rows, "llama_time_to_first_token_seconds_count")
    reasons = {reason: metrics.grown("llama_requests_total", finish_reason=reason) for reason in REASONS}
    expected = {"stop": 1, "length": completed, "cancelled": 1, "invalid": 3, "unavailable": 0, "error": 0}
    assert reasons == expected
    assert metrics.grown("llama_prompt_tokens_total") == TOKENS * rows
    assert metrics.grown("llama_queue_time_seconds_count") == rows
    assert metrics.grown("llama_request_latency_seconds_count") == completed + 1
    certain = sum(limits) + 12 + stopped.num_output_tokens + 9 * len(streams)
    cancelled = metrics.grown("llama_generated_tokens_total") - certain
    assert 1 <= cancelled < 250
    assert metrics.grown("llama_step_rows_sum") == certain + cancelled
    assert metrics.grown("llama_step_rows_count") == metrics.grown("llama_steps_total")
    # Prompts of the same length need no padding, prefilled together or not.
    assert metrics.grown("llama_step_prefill_tokens_sum") == TOKENS * rows
    assert metrics.grown("llama_step_rows_bucket", le="2") == metrics.grown("llama_step_rows_bucket", le="+Inf")
