"""Compose file, Dockerfile, supervisor, health check and settings agree; Docker is not needed."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from contract.code_blocks import ROOT
from llama_engine.settings import BOUNDS, ENVIRONMENT_PREFIX, Integer
from triton_supervisor.command import REPOSITORY, server_environment
from triton_supervisor.settings import FLUSH_S, STOP_MARGIN_S, UNLOAD_S, RefusedError, Settings

DOCKER = ROOT / "deploy" / "docker"
COMPOSE = (ROOT / "docker-compose.yml").read_text()
GPU = (DOCKER / "compose.gpu.yml").read_text()
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
SERVICE = yaml.safe_load(COMPOSE)["services"]["server"]
VARIABLES = {*re.findall(r"\$\{(\w+)", COMPOSE + GPU), *SERVICE["build"]["args"], *SERVICE["environment"]}
MODEL_SETTINGS = {f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in BOUNDS}


def seconds(duration: str) -> int:
    """Convert a duration with one unit, as compose writes it: 90s, 2m."""
    number, unit = re.fullmatch(r"(\d+)([smh])", duration).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60, "h": 3600}[unit]


def only_match(pattern: str, text: str) -> str:
    (found,) = re.findall(pattern, text, re.MULTILINE)
    return str(found)


def test_docker_waits_until_a_server_has_drained() -> None:
    default = Settings.of({})
    assert seconds(SERVICE["stop_grace_period"]) == default.notice + default.grace + STOP_MARGIN_S
    assert UNLOAD_S + FLUSH_S <= STOP_MARGIN_S - 5
    assert server_environment({}, default.grace)["LLAMA_DRAIN_SECONDS"] == str(default.grace)
    # Supervisor and model have the same longest grace period.
    bound = BOUNDS["drain_seconds"]
    assert isinstance(bound, Integer)
    assert Settings.of({"TRITON_GRACE_SECONDS": str(bound.high)}).grace == bound.high
    with pytest.raises(RefusedError, match=f"1 ... {bound.high}"):
        Settings.of({"TRITON_GRACE_SECONDS": str(bound.high + 1)})


def test_process_1_is_a_supervisor_that_the_image_has() -> None:
    assert only_match(r"^ENTRYPOINT (.*)$", DOCKERFILE) == '["python3", "-P", "-m", "triton_supervisor"]'
    for package in ("client/triton_llama", "deploy/supervisor/triton_supervisor"):
        target = f"/srv/triton-llama/python/{Path(package).name}"
        assert re.search(rf"^COPY {package} {target}$", DOCKERFILE, re.MULTILINE), package
    assert re.search(r"^ +PYTHONPATH=/srv/triton-llama/python \\$", DOCKERFILE, re.MULTILINE)
    assert f"COPY model_repository {REPOSITORY}\n" in DOCKERFILE
    # Named there without a value, it would unset the image's.
    assert re.search(r"^ +TRITON_STATE_FILE=\S+$", DOCKERFILE, re.MULTILINE)
    assert "TRITON_STATE_FILE" not in SERVICE["environment"]
    # Another init would be process 1, and compose tests would prove nothing for Kubernetes, which has none.
    assert "init" not in SERVICE


def test_the_health_check_times_out_before_docker_does() -> None:
    health = SERVICE["healthcheck"]
    own = float(health["test"][health["test"].index("--timeout") + 1])
    assert own + 5 <= seconds(health["timeout"]) <= seconds(health["interval"])


def test_the_health_check_runs_the_images_program() -> None:
    assert SERVICE["healthcheck"]["test"][:2] == ["CMD", "/srv/triton-llama/bin/health"]
    assert "ln -s ../python/triton_llama/health.py /srv/triton-llama/bin/health " in DOCKERFILE
    # It finds its package beside its own folder.
    assert re.search(r"^COPY client/triton_llama /srv/triton-llama/python/triton_llama$", DOCKERFILE, re.MULTILINE)


def test_tritons_ports_are_published_on_this_machine_only_by_default() -> None:
    expected = [
        f"${{TRITON_BIND_ADDRESS:-127.0.0.1}}:${{TRITON_{service}_PORT:-{port}}}:{port}"
        for service, port in (("HTTP", 8000), ("GRPC", 8001), ("METRICS", 8002))
    ]
    assert SERVICE["ports"] == expected
    assert only_match(r"^EXPOSE (.*)$", DOCKERFILE) == "8000 8001 8002"


def test_the_base_image_has_one_default() -> None:
    assert only_match(r"^ARG TRITON_IMAGE=(.*)$", DOCKERFILE) == "nvcr.io/nvidia/tritonserver:26.04-py3"
    # Without a value: compose passes it only if it is set.
    assert "TRITON_IMAGE" in SERVICE["build"]["args"]
    assert "# syntax=" not in DOCKERFILE.splitlines()[0]


def test_compose_passes_every_setting_of_the_model_and_no_unknown_one() -> None:
    passed = {name for name in SERVICE["environment"] if name.startswith(ENVIRONMENT_PREFIX)}
    assert passed == MODEL_SETTINGS
    # A value in the compose file would be a second default.
    assert not [name for name in SERVICE["environment"] if "=" in name]
    assert not re.findall(rf"\$\{{{ENVIRONMENT_PREFIX}\w+", COMPOSE + GPU)


def test_the_container_is_locked_down() -> None:
    assert SERVICE["read_only"] is True
    assert SERVICE["cap_drop"] == ["ALL"]
    assert SERVICE["security_opt"] == ["no-new-privileges:true"]
    assert only_match(r"^USER (.*)$", DOCKERFILE) == "1000:1000"
    # Reserving a GPU or raising a limit fails on some machines, so only compose.gpu.yml does it.
    assert not {"deploy", "ulimits", "privileged", "runtime", "gpus"} & SERVICE.keys()


def test_every_package_of_the_image_is_pinned() -> None:
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().split() if "==" in line}
    extra = [line for line in metadata.requires("triton-llama") or () if line.endswith('extra == "server"')]
    names = {re.split(r"[^\w-]", line)[0].lower() for line in extra}
    assert names == {"torch", "transformers", "bitsandbytes", "accelerate", "numpy", "tritonclient"}
    assert names <= pinned


def test_the_build_context_is_what_the_dockerfile_copies() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    taken = set(re.findall(r"--mount=type=bind,source=(\S+?),", DOCKERFILE))
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE):
        taken |= set(sources.split())
    assert taken == allowed
    assert [path for path in taken if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", sorted(VARIABLES - MODEL_SETTINGS))
def test_every_variable_is_documented(name: str) -> None:
    assert f"`{name}`" in (DOCKER / "README.md").read_text()
