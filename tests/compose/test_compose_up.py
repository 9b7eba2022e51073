"""`docker compose up`: the server answers on the published ports, and the container is as locked up as it claims."""

from __future__ import annotations

import http.client
import json

import pytest
from compose.project import SERVICE, ComposeProject
from triton_llama import LlamaClient
from triton_llama.endpoint import Protocol

HTTP, GRPC, METRICS = 8000, 8001, 8002
WRITE_PROTECTED = ["/", "/etc", "/opt/triton-llama/python", "/srv/triton-llama/model_repository/llama/1"]


@pytest.mark.parametrize(("protocol", "port"), [("http", HTTP), ("grpc", GRPC)])
def test_a_generation_through_the_published_port_is_complete(
    served: ComposeProject, protocol: Protocol, port: int
) -> None:
    with LlamaClient(served.address(port), protocol) as client:
        completion = client.generate("The list class in Python", max_tokens=20, min_tokens=20)
    assert completion.num_output_tokens == 20
    assert completion.finish_reason == "length"
    assert completion.text.strip()


def test_the_embedded_checkpoint_is_served_in_8_bits(served: ComposeProject) -> None:
    log = served.compose("logs", "--no-color").stdout
    assert " in int8" in log


def test_the_metrics_port_is_published(served: ComposeProject) -> None:
    host, _, port = served.address(METRICS).partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    assert 'nv_inference_request_success{model="llama"' in text


@pytest.mark.parametrize("port", [HTTP, GRPC, METRICS])
def test_the_ports_are_not_published_to_the_network(served: ComposeProject, port: int) -> None:
    assert served.address(port).startswith("127.0.0.1:")


def test_healthy_means_that_the_model_computed(served: ComposeProject) -> None:
    health = served.inspect(".State.Health")
    assert isinstance(health, dict)
    assert health["Status"] == "healthy"
    last = health["Log"][-1]
    assert last["ExitCode"] == 0
    assert last["Output"].startswith(("healthy: one token in ", "healthy: a step "))


def test_no_process_is_root_or_can_become_it(served: ComposeProject) -> None:
    # Our own `exec` is among the processes: it gets the container's user and limits, too.
    lines = served.inside("sh", "-c", "cat /proc/[0-9]*/status").stdout.splitlines()
    values = [line.split() for line in lines]
    assert sum(words[0] == "Name:" and "triton_python_b" in words[1] for words in values) >= 1
    assert {tuple(words[1:]) for words in values if words[0] == "Uid:"} == {("1000",) * 4}
    assert {tuple(words[1:]) for words in values if words[0] == "Gid:"} == {("1000",) * 4}
    assert {words[1] for words in values if words[0] in ("CapPrm:", "CapEff:", "CapBnd:")} == {"0" * 16}
    assert {words[1] for words in values if words[0] == "NoNewPrivs:"} == {"1"}


@pytest.mark.parametrize("folder", WRITE_PROTECTED)
def test_the_root_filesystem_cannot_be_written(served: ComposeProject, folder: str) -> None:
    attempt = served.inside("touch", f"{folder}/written", check=False)
    assert attempt.returncode != 0
    assert "Read-only file system" in attempt.stderr


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm", "/var/cache/triton-llama"])
def test_the_server_can_write_where_it_must(served: ComposeProject, folder: str) -> None:
    served.inside("sh", "-c", f"touch {folder}/written && rm {folder}/written")


def test_an_unknown_config_is_refused_with_the_known_ones(served: ComposeProject) -> None:
    arguments = ("run", "--rm", "--no-deps", "-T", "--env", "TRITON_MODEL_CONFIG=batched_int9", SERVICE)
    refused = served.compose(*arguments, check=False)
    assert refused.returncode == 2
    (line,) = [line for line in (refused.stdout + refused.stderr).splitlines() if "triton_supervisor: " in line]
    assert "batched_int9" in line
    assert "default batched_fp16 batched_int8 naive_fp16" in line


def test_an_unknown_setting_stops_the_server_with_its_name(served: ComposeProject) -> None:
    arguments = ("run", "--rm", "--no-deps", "-T", "--env", "LLAMA_SLOTTS=8", SERVICE)
    refused = served.compose(*arguments, timeout=240, check=False)
    assert refused.returncode != 0
    assert "LLAMA_SLOTTS" in refused.stdout + refused.stderr


def test_the_gpu_file_adds_every_gpu_and_nothing_else_changes(served: ComposeProject) -> None:
    files = ("--file", "docker-compose.yml", "--file", "deploy/docker/compose.gpu.yml")
    plain = json.loads(served.compose("config", "--format", "json").stdout)["services"][SERVICE]
    gpu = json.loads(served.compose(*files, "config", "--format", "json").stdout)["services"][SERVICE]
    (device,) = gpu.pop("deploy")["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    assert device["count"] == -1
    assert gpu.pop("ulimits")["memlock"] == -1
    assert gpu == plain
