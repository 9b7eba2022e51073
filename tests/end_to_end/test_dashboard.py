"""Every query of the dashboard and every rule has data when a real Prometheus scrapes a server under load."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import yaml
from deploy.debian_packages import prometheus_or_skip
from end_to_end.servers import HTTP, is_healthy, until
from end_to_end.wires import Refusal, generate
from frontend.endpoints import Endpoint
from triton_local.ports import choose_ports
from triton_local.server import LocalTriton

from deploy import monitoring_files as monitoring

PAUSE = "500ms"
"""Between two scrapes, and between two evaluations of the rules."""

ALERTS = [rule for rule in monitoring.rules() if rule.alerts]

Prometheus = Callable[..., Any]


@pytest.fixture(scope="module")
def prometheus(triton: LocalTriton, served: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """The API of a Prometheus that scrapes a server and an endpoint while clients send requests: path and parameters →
    data.
    """
    program, folder = prometheus_or_skip(), tmp_path_factory.mktemp("prometheus")
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
        subprocess.Popen([program.server, *options], stdout=output, stderr=output, env=environment) as process,
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
    """Run a client of the server and one of the endpoint; one in five of their requests is invalid."""
    enough = threading.Event()

    def repeat(ask: Callable[[float], bool]) -> None:
        """Ask with a temperature, which returns whether it is answered."""
        for number in itertools.count():
            if enough.wait(0.05):
                return
            assert ask(0.0 if number % 5 else 9.0) == (number % 5 != 0)

    def answered(temperature: float) -> bool:
        request = {"text_input": "Return a list of", "max_tokens": 12, "min_tokens": 12, "temperature": temperature}
        return not isinstance(generate(server, request), Refusal)

    # The endpoint has a TTFT of streams only.
    def streamed(temperature: float) -> bool:
        return openai.chat(stream=True, max_tokens=12, temperature=temperature).status_code == 200

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(repeat, answered), pool.submit(repeat, streamed)]
        try:
            yield
        finally:
            enough.set()
        for client in asking:
            client.result()


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
        if query.panel in monitoring.GPU_PANELS:
            _values(prometheus, query.resolved)
        else:
            _has_data(prometheus, query.resolved)
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
