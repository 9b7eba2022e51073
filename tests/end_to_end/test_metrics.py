"""Every metric is on Triton's endpoint under the model's labels, and has the right value after a known load."""

from __future__ import annotations

import time
from functools import partial

import pytest
from end_to_end.metrics import Metrics
from end_to_end.servers import HTTP
from end_to_end.streams import STREAM_WIRES, Call
from end_to_end.wires import Refusal, ask, at_once, generate
from llama_engine.observability.metrics import DRAFT_SOURCES, METRICS
from triton_local.server import LocalTriton

TOKENS = 6
"""Of the prompt, the beginning-of-text token included."""


def _request(limit: int) -> dict[str, object]:
    return {"text_input": "Return a list of the", "max_tokens": limit, "min_tokens": limit, "temperature": 0.0}


@pytest.mark.parametrize("narrow", ["narrow_default"], indirect=True)
def test_every_metric_is_on_the_page_as_declared(narrow: LocalTriton, metrics: Metrics) -> None:
    ask(narrow, generate, **_request(2))
    page, series = HTTP.get(f"http://{narrow.metrics_address}/metrics").text, metrics.read()
    for metric in METRICS:
        assert f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n" in page
        parts = [f"{metric.name}_{part}" for part in ("bucket", "sum", "count")]
        for name in parts if metric.kind == "histogram" else [metric.name]:
            for value in metric.values:
                labels = {"model": "llama", "version": "1"} | ({metric.label: value} if metric.label else {})
                assert any(other == name and labels.items() <= pairs for other, pairs in series), (name, labels)
    # Otherwise the last of several instances would overwrite the others; counters of all instances add up.
    gauges = {metric.name for metric in METRICS if metric.kind == "gauge"}
    labelled = {line.partition("{")[0] for line in page.splitlines() if 'model_instance="llama_0_0"' in line}
    assert labelled == gauges


@pytest.mark.parametrize("narrow", ["narrow_streaming"], indirect=True)
def test_a_mixed_load_is_counted_exactly(narrow: LocalTriton, metrics: Metrics) -> None:
    """More rows than slots, and every finish reason but an internal error."""
    began = time.time()
    # No more at once than the queue holds.
    limits = [3, 8, 1]
    at_once([partial(ask, narrow, generate, **_request(limit)) for limit in limits])
    known = ask(narrow, generate, **_request(12))
    stopped = ask(narrow, generate, **_request(12) | {"min_tokens": 0, "stop_words": [known.text[-1]]})
    assert stopped.finish_reason == "stop"
    for bad in ({"max_tokens": 0}, {"temperature": 9.0}, {"temprature": 1.0}):
        assert isinstance(generate(narrow, _request(4) | bad), Refusal)
    assert [wire(narrow, _request(9)).whole.num_output_tokens for wire in STREAM_WIRES] == [9, 9]
    # Otherwise the slot seen in use below might be the last row's, and the call cancelled before it runs.
    metrics.wait_for(len(limits) + 2 + len(STREAM_WIRES), "llama_request_latency_seconds_count")
    metrics.wait(Metrics.idle, "all have ended")
    # Drafts could shorten a greedy one.
    with Call(narrow, _request(1500) | {"temperature": 2.0}) as call:
        metrics.wait_for_slots(1)
        call.cancel()
        metrics.wait_for(1, "llama_requests_total", finish_reason="cancelled")
    metrics.wait(Metrics.idle, "all have ended")
    completed = len(limits) + 1 + len(STREAM_WIRES)
    rows = completed + 2
    # Triton gets metrics one after another, this one of the cancelled row last.
    metrics.wait_for(rows, "llama_time_to_first_token_seconds_count")
    assert metrics.reasons() == {"stop": 1, "length": completed, "cancelled": 1, "invalid": 3}
    certain = sum(limits) + 12 + stopped.num_output_tokens + 9 * len(STREAM_WIRES)
    cancelled = metrics.grown("llama_generated_tokens_total") - certain
    assert 1 <= cancelled < 750
    right = sum(metrics.grown("llama_accepted_draft_tokens_total", source=source) for source in DRAFT_SOURCES)
    expected = {
        "llama_prompt_tokens_total": TOKENS * rows,
        "llama_queue_time_seconds_count": rows,
        "llama_step_errors_total": 0,
        "llama_request_latency_seconds_count": completed + 1,
        "llama_step_sequences_sum": certain + cancelled - right,
        "llama_step_sequences_count": metrics.grown("llama_steps_total"),
        # Prompts of the same length need no padding, prefilled together or not.
        "llama_step_prefill_tokens_sum": TOKENS * rows,
    }
    assert {name: metrics.grown(name) for name in expected} == expected
    assert began <= metrics.now("llama_last_step_timestamp_seconds") <= time.time()
    assert metrics.now("llama_slots") == 2
    queued, first, whole = (
        metrics.grown(f"llama_{name}_seconds_sum") for name in ("queue_time", "time_to_first_token", "request_latency")
    )
    assert 0 <= queued <= first <= whole
    assert metrics.grown("llama_step_sequences_bucket", le="2") == metrics.grown(
        "llama_step_sequences_bucket", le="+Inf"
    )
