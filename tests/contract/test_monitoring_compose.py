"""The compose profile `monitoring`: locked down like the server, on this machine only, provisioned from files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from contract.code_blocks import ROOT
from contract.monitoring_files import DASHBOARD, MONITORING

COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = {
    name: service for name, service in COMPOSE["services"].items() if service.get("profiles") == ["monitoring"]
}
PORTS = {"prometheus": ("TRITON_PROMETHEUS_PORT", 9090), "grafana": ("TRITON_GRAFANA_PORT", 3000)}


def _mounts(service: str) -> dict[str, Path]:
    """Return the project's files that a container mounts, by their path inside."""
    volumes = [volume.split(":") for volume in SERVICES[service]["volumes"]]
    return {target: ROOT / source for source, target, *_ in volumes if source.startswith("./")}


def test_the_profile_has_prometheus_and_grafana_and_only_the_server_is_outside() -> None:
    assert set(SERVICES) == set(PORTS)
    # A plain `docker compose up` starts the server alone.
    assert [name for name, service in COMPOSE["services"].items() if "profiles" not in service] == ["server"]


@pytest.mark.parametrize("name", PORTS)
def test_a_service_is_locked_down(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service["user"].startswith(("0", "root"))
    assert not {"privileged", "network_mode", "pid", "cap_add"} & service.keys()
    assert all(mount.endswith(":ro") for mount in service["volumes"] if mount.startswith("./"))


@pytest.mark.parametrize("name", PORTS)
def test_a_service_is_published_on_this_machine_and_its_image_has_a_version(name: str) -> None:
    variable, port = PORTS[name]
    address = "${TRITON_MONITORING_BIND_ADDRESS:-127.0.0.1}"
    assert SERVICES[name]["ports"] == [f"{address}:${{{variable}:-{port}}}:{port}"]

    assert re.fullmatch(rf"\$\{{TRITON_{name.upper()}_IMAGE:-\w+/{name}:v?\d+\.\d+\.\d+\}}", SERVICES[name]["image"])


def test_grafana_has_no_account_and_shows_everything_read_only() -> None:
    environment = dict(line.split("=", 1) for line in SERVICES["grafana"]["environment"])
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    assert environment["GF_AUTH_ANONYMOUS_ENABLED"] == "true"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert not [name for name in environment if "PASSWORD" in name]


def test_prometheus_scrapes_every_replica_of_the_server() -> None:
    (mounted,) = _mounts("prometheus").items()
    assert mounted == ("/etc/prometheus", MONITORING)
    assert "--config.file=/etc/prometheus/prometheus.yml" in SERVICES["prometheus"]["command"]
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    (scraped,) = config["scrape_configs"]
    # The DNS name resolves to every replica; a static target `server:8002` would be one of them at random.
    assert "static_configs" not in scraped
    (found,) = scraped["dns_sd_configs"]
    (service,) = found["names"]
    assert found["type"] == "A"
    assert COMPOSE["services"][service]["ports"][-1].endswith(f":{found['port']}")
    assert "metrics_path" not in scraped, "/metrics is the default of both programs"
    assert config["rule_files"] == ["rules/*.yml"]


def test_grafana_finds_its_data_source_and_its_dashboard() -> None:
    mounts = _mounts("grafana")
    provisioning = mounts["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["isDefault"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "triton-llama.yml").read_text())["providers"]
    dashboards = mounts[provider["options"]["path"]]
    environment = dict(line.split("=", 1) for line in SERVICES["grafana"]["environment"])
    home = Path(environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert json.loads((dashboards / home.name).read_text()) == DASHBOARD
