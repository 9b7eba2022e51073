"""`docker compose up`: the server responds on its published ports, and the container is locked down."""

from __future__ import annotations

import json

import pytest
from compose.project import GRPC, HTTP, METRICS, SERVICE, ComposeProject
from triton_llama import LlamaClient
from triton_llama.endpoint import Protocol

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
    assert " in int8" in served.compose("logs", "--no-color").stdout


def test_metrics_are_published(served: ComposeProject) -> None:
    assert 'nv_inference_request_success{model="llama"' in served.get(METRICS, "/metrics")


@pytest.mark.parametrize("port", [HTTP, GRPC, METRICS])
def test_the_ports_are_published_on_this_machine_only(served: ComposeProject, port: int) -> None:
    assert served.address(port).startswith("127.0.0.1:")


def test_healthy_means_that_the_model_computed(served: ComposeProject) -> None:
    health = served.inspect(".State.Health")
    assert isinstance(health, dict)
    assert health["Status"] == "healthy"
    last = health["Log"][-1]
    assert last["ExitCode"] == 0
    assert last["Output"].startswith(("healthy: one token in ", "healthy: a step "))


def test_no_process_is_root_or_can_become_root(served: ComposeProject) -> None:
    # The test's own `exec` is among them: it has the container's user and limits.
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
def test_the_server_can_write_to_its_volumes(served: ComposeProject, folder: str) -> None:
    served.inside("sh", "-c", f"touch {folder}/written && rm {folder}/written")


def test_an_unknown_config_is_refused_with_a_list_of_the_known_ones(served: ComposeProject) -> None:
    arguments = ("run", "--rm", "--no-deps", "-T", "--env", "TRITON_MODEL_CONFIG=batched_int9", SERVICE)
    refused = served.compose(*arguments, check=False)
    assert refused.returncode == 2
    (line,) = [line for line in (refused.stdout + refused.stderr).splitlines() if "triton_supervisor: " in line]
    assert "batched_int9" in line
    assert "default batched_fp16 batched_int8 naive_fp16" in line


def test_an_unknown_setting_is_refused_by_name(served: ComposeProject) -> None:
    arguments = ("run", "--rm", "--no-deps", "-T", "--env", "LLAMA_SLOTTS=8", SERVICE)
    refused = served.compose(*arguments, timeout=240, check=False)
    assert refused.returncode != 0
    assert "LLAMA_SLOTTS" in refused.stdout + refused.stderr


def test_the_gpu_file_adds_all_gpus_and_changes_nothing_else(served: ComposeProject) -> None:
    files = ("--file", "docker-compose.yml", "--file", "deploy/docker/compose.gpu.yml")
    plain = json.loads(served.compose("config", "--format", "json").stdout)["services"][SERVICE]
    gpu = json.loads(served.compose(*files, "config", "--format", "json").stdout)["services"][SERVICE]
    (device,) = gpu.pop("deploy")["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    assert device["count"] == -1
    assert gpu.pop("ulimits")["memlock"] == -1
    assert gpu == plain
