"""`docker compose up`: the server responds on its published ports, its probes work, and it is locked down."""

from __future__ import annotations

import json

import pytest
from end_to_end.compose.conftest import NewProject
from end_to_end.compose.docker_engine import GRPC, HTTP, METRICS, OPENAI, SERVICE, ComposeProject
from end_to_end.servers import HTTP as CLIENT
from llama_engine.kernels.cpu.build import COMPILER_FLAGS, object_path
from triton_llama import LlamaClient
from triton_llama.status import read_model_info

WRITE_PROTECTED = ["/", "/etc", "/opt/triton-llama/python", "/srv/triton-llama/model_repository/llama/1"]
FOR_THE_SERVER = {"LLAMA_MODEL": "meta-llama/Llama-2-7b-chat-hf", "HF_TOKEN": "hf_secret", "LLAMA_SLOTS": "16"}
FOR_COMPOSE = {"TRITON_BIND_ADDRESS": "127.0.0.1", "TRITON_SHM_SIZE": "2gb"}


def test_generate_stream_is_answered_by_default(served: ComposeProject) -> None:
    # So many that they can't all wait for their turn on a busy machine and come in one chunk.
    body = {"text_input": "The list class in Python", "max_tokens": 200, "min_tokens": 200, "stream": True}
    text = _post(served.address(HTTP), "/v2/models/llama/generate_stream", body)
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert sum(chunk["num_output_tokens"] for chunk in chunks) == 200
    assert len(chunks) > 1


def test_a_generation_over_grpc_is_complete(served: ComposeProject) -> None:
    with LlamaClient(served.address(GRPC), "grpc") as client:
        assert client.generate("The list class in Python", max_tokens=20, min_tokens=20).num_output_tokens == 20


def test_every_port_is_published_on_this_machine_only_metrics_too(served: ComposeProject) -> None:
    addresses = [served.address(port) for port in (HTTP, GRPC, METRICS)]
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    assert 'nv_inference_request_success{model="llama"' in CLIENT.get(f"http://{addresses[-1]}/metrics").text


def test_healthy_means_that_the_model_computed(served: ComposeProject) -> None:
    health = served.inspect(".State.Health")
    assert isinstance(health, dict)
    assert health["Status"] == "healthy"
    last = health["Log"][-1]
    assert last["ExitCode"] == 0
    assert last["Output"].startswith(("healthy: one token in ", "healthy: a step "))


def test_the_container_computes_with_the_compiled_kernels(served: ComposeProject) -> None:
    """The base image of these tests has no compiler: the objects are those that `make` left in the checkout."""
    expected = {object_path(name).name for name in COMPILER_FLAGS if object_path(name).exists()}
    if not expected:
        pytest.skip("this checkout has no compiled kernels: no C++ compiler")
    folder = "/srv/triton-llama/model_repository/llama/1/llama_engine/kernels/cpu/build"
    assert expected <= set(served.inside("ls", folder).stdout.split())
    (info,) = read_model_info(served.address(METRICS), "llama").instances
    assert info.computation.startswith("exact INT8, ")
    assert info.computation.endswith(" kernels: batch-invariant")


def test_the_endpoint_streams_a_guided_chat_on_its_published_port(served: ComposeProject) -> None:
    address = served.address(OPENAI, "openai")
    assert address.startswith("127.0.0.1:")
    messages = [{"role": "user", "content": "What is a list?"}]
    body = {"model": "SmolLM2-135M-Instruct", "messages": messages, "max_tokens": 20, "stream": True}
    guide = {"response_format": {"type": "json_object"}}
    events = _post(address, "/v1/chat/completions", {**body, **guide}).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    assert choices[-1]["finish_reason"]
    assert "".join(choice["delta"].get("content") or "" for choice in choices).lstrip().startswith("{")


def test_no_process_is_root_or_can_become_root(served: ComposeProject) -> None:
    # The test's own `exec` is among them: it has the container's user and limits.
    lines = served.inside("sh", "-c", "cat /proc/[0-9]*/status").stdout.splitlines()
    values = [line.split() for line in lines]
    assert sum(words[0] == "Name:" and "triton_python_b" in words[1] for words in values) >= 1
    assert {tuple(words[1:]) for words in values if words[0] in ("Uid:", "Gid:")} == {("1000",) * 4}
    assert {words[1] for words in values if words[0] in ("CapPrm:", "CapEff:", "CapBnd:")} == {"0" * 16}
    assert {words[1] for words in values if words[0] == "NoNewPrivs:"} == {"1"}


def test_only_the_volumes_can_be_written(served: ComposeProject) -> None:
    attempt = served.inside("touch", *(f"{folder}/written" for folder in WRITE_PROTECTED), check=False)
    assert attempt.stderr.count("Read-only file system") == len(WRITE_PROTECTED)
    for folder in ("/tmp", "/dev/shm", "/var/cache/triton-llama"):
        served.inside("sh", "-c", f"touch {folder}/written && rm {folder}/written")


def test_only_the_servers_variables_that_are_set_reach_the_container(new_project: NewProject) -> None:
    with new_project({**FOR_THE_SERVER, **FOR_COMPOSE}) as project:
        config = json.loads(project.compose("config", "--format", "json").stdout)
    environment = config["services"][SERVICE]["environment"]
    values = {name: value for name, value in environment.items() if value is not None}
    assert values == {"OMP_NUM_THREADS": "1", **FOR_THE_SERVER}


def _post(address: str, path: str, body: dict[str, object]) -> str:
    return CLIENT.post(f"http://{address}{path}", json=body).raise_for_status().text
