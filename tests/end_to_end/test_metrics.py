"""Every metric is on Triton's endpoint under the model's labels, and has the right value after a known load.

Every query of the dashboard and every rule has data when a real Prometheus scrapes a server under load.
"""

from __future__ import annotations

import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import yaml
from deploy.programs import programs_or_skip
from end_to_end.metrics import Metrics
from end_to_end.servers import HTTP, is_healthy, until
from end_to_end.streams import STREAM_WIRES, Call
from end_to_end.wires import Refusal, ask, at_once, generate
from frontend.endpoints import Endpoint
from llama_engine.observability.metrics import DRAFT_SOURCES, METRICS
from triton_local.ports import choose_ports
from triton_local.server import LocalTriton

from deploy import monitoring_files as monitoring

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


PAUSE = "500ms"
"""Between two scrapes, and between two evaluations of the rules."""

ALERTS = [rule for rule in monitoring.rules() if rule.alerts]

Prometheus = Callable[..., Any]


@pytest.fixture(scope="module")
def prometheus(triton: LocalTriton, served: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """The API of a Prometheus that scrapes a server and an endpoint while clients send requests: path and parameters →
    data.
    """
    (program,), folder = programs_or_skip("prometheus", ["prometheus"]), tmp_path_factory.mktemp("prometheus")
    address = f"127.0.0.1:{choose_ports('127.0.0.1', {'http': 0})['http']}"
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(_config(triton.metrics_address, f"127.0.0.1:{served.port}")))
    options = (f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}")
    # Two cores, and the server under test needs one.
    environment = {**os.environ, "GOMAXPROCS": "1"}
    log = folder / "log"

    def get(path: str, **parameters: str) -> Any:  # noqa: ANN401 - whatever the API has there
        answer = HTTP.get(f"http://{address}/api/v1/{path}", params=parameters)
        # A refused expression has a message of Prometheus.
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    with (
        log.open("w") as output,
        subprocess.Popen([program, *options], stdout=output, stderr=output, env=environment) as process,
        _load(triton, served),
    ):
        try:
            until(lambda: is_healthy(f"http://{address}/-/ready"), lambda: f"Prometheus is ready: {log.read_text()}")
            yield get
        finally:
            process.terminate()
    assert process.returncode == 0, log.read_text()


def _config(*targets: str) -> dict[str, Any]:
    """Return the project's config with these targets in place of the services' names."""
    config: dict[str, Any] = yaml.safe_load((monitoring.MONITORING / "prometheus.yml").read_text())
    config["global"] |= {"scrape_interval": PAUSE, "evaluation_interval": PAUSE}
    config["rule_files"] = [str(monitoring.MONITORING / pattern) for pattern in config["rule_files"]]
    for scraped, target in zip(config["scrape_configs"], targets, strict=True):
        del scraped["dns_sd_configs"]
        scraped["static_configs"] = [{"targets": [target]}]
    return config


@contextmanager
def _load(server: LocalTriton, openai: Endpoint) -> Iterator[None]:
    """Ask the server and the endpoint in turn; one in five of the requests is invalid."""
    enough = threading.Event()

    def ask() -> None:
        number = 0
        while not enough.wait(0.05):
            number += 1
            temperature = 0.0 if number % 5 else 9.0
            length = {"max_tokens": 12, "min_tokens": 12}
            generate(server, {"text_input": "Return a list of", **length, "temperature": temperature})
            # The endpoint has a TTFT of streams only.
            openai.chat(stream=True, max_tokens=12, temperature=temperature)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield
        finally:
            enough.set()
        asking.result()


def _values(prometheus: Prometheus, expression: str) -> list[float]:
    """Return the present values of an expression's series."""
    return [float(series["value"][1]) for series in prometheus("query", query=expression)["result"]]


def _has_data(prometheus: Prometheus, expression: str) -> None:
    """Wait until an expression has a finite value: a division without data is NaN."""
    until(lambda: any(map(math.isfinite, _values(prometheus, expression))), lambda: f"{expression} has data")


@pytest.mark.long
def test_every_query_and_recorded_rule_has_data(prometheus: Prometheus) -> None:
    """Without a GPU only the syntax of its panels is tested; tests/deploy checks the names of its series."""
    for query in monitoring.queries():
        check = _values if monitoring.metrics_of(query) & monitoring.GPU_METRICS else _has_data
        check(prometheus, query)
    for rule in monitoring.rules():
        if not rule.alerts:
            labels = ", ".join(f'{name}="{value}"' for name, value in rule.labels.items())
            _has_data(prometheus, f"{rule.name}{{{labels}}}")


def test_every_alert_queries_series_that_exist(prometheus: Prometheus) -> None:
    """Series of a GPU are left out."""
    for alert in ALERTS:
        _values(prometheus, alert.expr)
        for selector in monitoring.selectors(alert.expr):
            if not monitoring.metrics_of(selector) <= monitoring.GPU_METRICS:
                _has_data(prometheus, selector)


def test_no_alert_is_active_under_normal_load(prometheus: Prometheus) -> None:
    def states() -> dict[str, dict[str, Any]]:
        return {rule["name"]: rule for group in prometheus("rules")["groups"] for rule in group["rules"]}

    def active() -> dict[str, str]:
        return {name: rule["state"] for name, rule in states().items() if rule.get("state", "inactive") != "inactive"}

    _has_data(prometheus, "rate(llama_steps_total[1m]) > 0")
    before = states()
    until(
        lambda: all(rule["lastEvaluation"] != before[name]["lastEvaluation"] for name, rule in states().items()),
        lambda: "every rule was evaluated since",
    )
    assert {name: rule.get("lastError") for name, rule in states().items() if rule["health"] != "ok"} == {}
    assert {name for name, rule in states().items() if "state" in rule} == {alert.name for alert in ALERTS}
    # Pending counts as firing: the test does not wait for an alert's `for`. The first scrapes may be incomplete.
    until(lambda: not active(), lambda: f"no alert is pending or fires, but {active()}")
