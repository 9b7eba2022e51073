"""Compose files, Dockerfile, its lock, supervisor, health check, settings and pages agree; Docker is not needed."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml
from deploy.code_blocks import ROOT
from deploy.manifests import PROBE_MARGIN_S, seconds
from llama_engine.bounds import Integer
from llama_engine.settings import BOUNDS, ENVIRONMENT_PREFIX
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from triton_llama_openai import settings as endpoint_settings
from triton_supervisor.settings import STOP_MARGIN_S, UNLOAD_S, RefusedError, Settings
from triton_supervisor.supervisor import END_S, FLUSH_S

DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()
COMPOSE, GPU = ((ROOT / name).read_text() for name in ("docker-compose.yml", "deploy/docker/compose.gpu.yml"))
ENVOY = (ROOT / "deploy/envoy/compose.yml").read_text()
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE)["services"]
LOCKED_DOWN = {**SERVICES, "envoy": yaml.safe_load(ENVOY.replace("!reset ", ""))["services"]["envoy"]}
SERVER, OPENAI = SERVICES["server"], SERVICES["openai"]

MODEL_SETTINGS = {f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in BOUNDS}
ENDPOINT_SETTINGS = {
    f"{endpoint_settings.ENVIRONMENT_PREFIX}{name.upper()}" for name in endpoint_settings.Settings.model_fields
}
PASSED = {*SERVER["environment"], *OPENAI["environment"]}
VARIABLES = {*re.findall(r"\$\{(\w+)", COMPOSE + GPU + ENVOY), *SERVER["build"]["args"], *PASSED}
DOCUMENTED = sorted(VARIABLES - MODEL_SETTINGS - ENDPOINT_SETTINGS)


@pytest.mark.parametrize("name", LOCKED_DOWN)
def test_a_service_is_locked_down(name: str) -> None:
    service = LOCKED_DOWN[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "network_mode", "pid", "cap_add"} & service.keys()
    assert re.findall("^USER (.*)$", DOCKERFILE, re.MULTILINE) == ["1000:1000"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_published_on_this_machine_only(name: str) -> None:
    address = r"\$\{TRITON_(MONITORING_)?BIND_ADDRESS:-127\.0\.0\.1\}"
    if name == "openai":
        # It may be published where Triton isn't: its requests can't end Triton (docs/security.md).
        address = rf"\$\{{TRITON_OPENAI_BIND_ADDRESS:-{address}\}}"
    assert all(re.fullmatch(rf"{address}:\$\{{\w+_PORT:-(\d+)\}}:\2", port) for port in SERVICES[name]["ports"])


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_variable_is_documented(name: str) -> None:
    pages = [(ROOT / f"deploy/{folder}/README.md").read_text() for folder in ("docker", "envoy")]
    assert any(f"`{name}`" in page for page in pages)


def test_docker_waits_until_a_server_has_drained() -> None:
    default = Settings.of({})
    assert seconds(SERVER["stop_grace_period"]) == default.grace + STOP_MARGIN_S
    assert UNLOAD_S + FLUSH_S + END_S <= STOP_MARGIN_S - 5
    assert default.for_model({})["LLAMA_DRAIN_SECONDS"] == str(default.grace)
    # Supervisor and model have the same longest grace period.
    bound = BOUNDS["drain_seconds"]
    assert isinstance(bound, Integer)
    assert Settings.of({"TRITON_GRACE_SECONDS": str(bound.high)}).grace == bound.high
    with pytest.raises(RefusedError, match=f"1 ... {bound.high}"):
        Settings.of({"TRITON_GRACE_SECONDS": str(bound.high + 1)})


def test_compose_passes_every_setting() -> None:
    passed = {name for name in SERVER["environment"] if name.startswith(ENVIRONMENT_PREFIX)}
    # A value in the compose file would be a second default.
    assert passed == MODEL_SETTINGS
    assert not re.findall(rf"\$\{{{ENVIRONMENT_PREFIX}\w+", COMPOSE + GPU)
    prefix = endpoint_settings.ENVIRONMENT_PREFIX
    assert OPENAI["command"][::2] == ["--host", "--triton"]
    # The port is the published one.
    by_option = {f"{prefix}{name}" for name in ("HOST", "TRITON", "PORT")}
    assert {name for name in OPENAI["environment"] if name.startswith(prefix)} == ENDPOINT_SETTINGS - by_option


def test_a_health_check_times_out_before_docker_does() -> None:
    for health in (SERVER["healthcheck"], OPENAI["healthcheck"]):
        assert health["test"][-2] == "--timeout"
        assert float(health["test"][-1]) + PROBE_MARGIN_S <= seconds(health["timeout"]) <= seconds(health["interval"])


def test_the_endpoint_ends_before_the_server() -> None:
    # compose stops a service before what it depends on.
    assert list(OPENAI["depends_on"]) == ["server"]
    assert seconds(OPENAI["stop_grace_period"]) >= endpoint_settings.Settings().grace + 10


LOCK = (ROOT / "deploy" / "docker" / "requirements.lock").read_text()
ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n", re.MULTILINE)
LOCKED = {canonicalize_name(name): version for name, version, _ in ENTRY.findall(LOCK)}
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OF_THE_IMAGE = ("server", "guided", "kv-events", "tracing", "openai")

CUDA = re.compile(r"nvidia-[a-z0-9-]+|cuda-[a-z]+|triton")
"""Packages of PyTorch's CUDA build; constraints.txt is made with its CPU build."""


def test_the_lock_pins_what_constraints_pin() -> None:
    lines = (ROOT / "constraints.txt").read_text().split()
    constraints = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    # Of the CUDA packages only those that constraints.txt knows.
    known = {name: constraints.get(name) for name in LOCKED if name in constraints or not CUDA.fullmatch(name)}
    assert known == {name: LOCKED[name] for name in known}


@pytest.mark.parametrize("extra", OF_THE_IMAGE)
def test_the_lock_has_every_package_of_an_extra_of_the_image(extra: str) -> None:
    for requirement in map(Requirement, EXTRAS[extra]):
        assert LOCKED[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_the_image_installs_the_lock_alone() -> None:
    assert DOCKERFILE.count("pip install") == 1
    (install,) = re.findall(r"^ +python3 -m pip install (.*?);", DOCKERFILE, re.MULTILINE | re.DOTALL)
    words = install.replace("\\\n", " ").split()
    assert {"--require-hashes", "--only-binary=:all:", '--requirement="$lock"'} <= set(words)
    assert [word for word in words if not word.startswith("-")] == []
    assert "source=deploy/docker/requirements.lock,target=/mnt/requirements.lock" in DOCKERFILE
