"""`docker compose --profile monitoring up`: Prometheus finds every replica by the service's name.

Grafana's image has no stand-in; tests/deploy checks Grafana's files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from deploy.code_blocks import ROOT
from end_to_end.compose.docker_engine import METRICS, ComposeProject
from end_to_end.compose.images import prometheus_image
from end_to_end.servers import HTTP, until

SERVICE = "prometheus"
ADDRESS = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"


@pytest.fixture(scope="module")
def address(served: ComposeProject, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a Prometheus beside the server; removed at the end, because other tests count the containers.

    It looks at its targets every second instead of 15 s and 30 s.
    """
    files = shutil.copytree(ROOT / "deploy" / "monitoring", tmp_path_factory.mktemp("quick") / "monitoring")
    config = (files / "prometheus.yml").read_text().replace("15s", "1s")
    (files / "prometheus.yml").write_text(config.replace("- names:", "- refresh_interval: 1s\n        names:"))
    quick = files.with_name("quick.yml")
    quick.write_text(json.dumps({"services": {SERVICE: {"volumes": [f"{files}:/etc/prometheus:ro"]}}}))
    variables = served.variables.read_text()
    additions = {
        "TRITON_PROMETHEUS_IMAGE": prometheus_image(served.engine),
        "TRITON_PROMETHEUS_PORT": "0",
        "COMPOSE_FILE": f"docker-compose.yml:{quick}",
    }
    served.variables.write_text(variables + "".join(f"{name}={value}\n" for name, value in additions.items()))
    try:
        _compose(served, "up", "--detach", "--wait", SERVICE, timeout=300)
        yield _compose(served, "port", SERVICE, "9090").strip()
    finally:
        _compose(served, "rm", "--stop", "--force", SERVICE)
        served.variables.write_text(variables)


def _compose(project: ComposeProject, *arguments: str, timeout: float = 60) -> str:
    return project.compose("--profile", "monitoring", *arguments, timeout=timeout).stdout


def _get(address: str, path: str) -> dict[str, Any]:
    data: dict[str, Any] = HTTP.get(f"http://{address}/api/v1/{path}").raise_for_status().json()["data"]
    return data


def _scraped(address: str) -> dict[str, str]:
    """Return the value of `up` for each active server, by HOST:PORT; that of a former one lasts half a minute."""
    labels = [target["labels"] for target in _get(address, "targets?state=active")["activeTargets"]]
    targets = {label["instance"] for label in labels if label["job"] == "triton-llama"}
    series = _get(address, "query?query=up%7Bjob%3D%22triton-llama%22%7D")["result"]
    values = {row["metric"]["instance"]: row["value"][1] for row in series}
    return {target: values.get(target, "") for target in targets}


def _target(project: ComposeProject, container: str) -> str:
    return f"{project.engine.inspect(container, ADDRESS)}:{METRICS}"


def test_prometheus_scrapes_every_replica_and_drops_one_that_is_gone(address: str, served: ComposeProject) -> None:
    assert address.startswith("127.0.0.1:")
    server = _target(served, _compose(served, "ps", "--quiet", "server").strip())
    until(lambda: _scraped(address) == {server: "1"}, lambda: f"the server is up: {_scraped(address)}")
    # A second server under the service's name, on no port of the host.
    replica = _compose(served, "run", "--detach", "--use-aliases", "--no-deps", "server").strip()
    try:
        both = {server: "1", _target(served, replica): "1"}
        assert len(both) == 2
        until(lambda: _scraped(address) == both, lambda: f"both are up: {_scraped(address)}")
    finally:
        served.engine.docker("rm", "--force", "--volumes", replica)
    until(lambda: _scraped(address) == {server: "1"}, lambda: f"it is dropped: {_scraped(address)}")


def test_prometheus_scrapes_the_endpoint(address: str) -> None:
    query = "query?query=up%7Bjob%3D%22triton-llama-openai%22%7D"
    until(
        lambda: [row["value"][1] for row in _get(address, query)["result"]] == ["1"],
        lambda: f"the endpoint is up: {_get(address, query)}",
    )
