"""Docker starts a server again whose model died; one that is stopped answers every accepted request first.

So do two servers behind Envoy: `docker compose -f docker-compose.yml -f deploy/envoy/compose.yml up`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import httpx
import pytest
from end_to_end.compose.conftest import NewProject
from end_to_end.compose.docker_engine import GRPC, HTTP, METRICS, OPENAI, STOP_S, ComposeProject, DockerEngine
from end_to_end.compose.images import envoy_image
from end_to_end.servers import HTTP as CLIENT
from end_to_end.servers import until
from triton_llama import LlamaClient
from triton_llama.address import Protocol

PROTOCOLS: tuple[Protocol | Literal["openai"], ...] = ("http", "grpc", "http", "openai")
TOKENS = 400
"""Long enough that the first request still runs when the last one arrives, on a busy machine too."""
PENDING = re.compile(r'^nv_inference_pending_request_count\{model="llama".*\} (\d+)', re.MULTILINE)
SMALL_MODEL = {
    "COMPOSE_FILE": "docker-compose.yml:tests/end_to_end/compose/small_model.yml",
    "LLAMA_MODEL": "/checkpoints/pydoc-llama",
}
KILL_THE_MODEL = """
for process in /proc/[0-9]*; do
  case $(cat $process/comm) in triton_python_b*) kill -9 ${process#/proc/} ;; esac
done
"""


@pytest.fixture(scope="module")
def own_project(new_project: NewProject) -> Iterator[ComposeProject]:
    """A server of its own, of a config that serves one request at a time; an empty setting means its default."""
    settings = {"TRITON_MODEL_CONFIG": "naive_fp16", "LLAMA_QUANTIZATION": "", **SMALL_MODEL}
    with new_project(settings) as project:
        yield project


@pytest.fixture
def project(own_project: ComposeProject) -> ComposeProject:
    """The server, healthy whatever the test before has done to it."""
    own_project.up()
    return own_project


def test_the_named_config_is_served(project: ComposeProject) -> None:
    config = CLIENT.get(f"http://{project.address(HTTP)}/v2/models/llama/config").json()
    assert config["max_batch_size"] == 1


def test_a_container_whose_model_is_killed_comes_back_by_the_restart_policy(project: ComposeProject) -> None:
    # The container may end before this command does.
    project.inside("sh", "-c", KILL_THE_MODEL, check=False)
    until(lambda: project.inspect(".RestartCount") == 1, project.log)
    # Waits until it is healthy again.
    project.compose("up", "--detach", "--wait", timeout=240)
    assert project.inspect(".RestartCount") == 1
    log = project.compose("logs", "--no-color").stdout.splitlines()
    (line,) = [line for line in log if "triton_supervisor: " in line]
    assert line.endswith(" is gone: it crashed, or was killed; the server ends with code 70")


def test_stop_answers_every_accepted_request(project: ComposeProject) -> None:
    """The first request runs; the others wait in Triton's queue, whose metric shows that they have arrived."""
    # Once: asking Docker for an address takes longer than a request waits. A restart may have changed it.
    addresses = {"http": project.address(HTTP), "grpc": project.address(GRPC)}
    openai, metrics = project.address(OPENAI, "openai"), project.address(METRICS)

    def generate(protocol: Protocol | Literal["openai"], tokens: int = TOKENS) -> int:
        if protocol == "openai":
            body = {"model": "pydoc-llama", "prompt": "def", "max_tokens": tokens, "min_tokens": tokens}
            response = CLIENT.post(f"http://{openai}/v1/completions", json=body, timeout=180).raise_for_status()
            return int(response.json()["usage"]["completion_tokens"])
        with LlamaClient(addresses[protocol], protocol, timeout=180) as client:
            return client.generate("def", max_tokens=tokens, min_tokens=tokens).num_output_tokens

    def queued() -> int:
        return int(PENDING.findall(CLIENT.get(f"http://{metrics}/metrics").text)[0])

    # The endpoint pauses between its attempts to reach a server that was restarted.
    assert generate("openai", 1) == 1
    with ThreadPoolExecutor(len(PROTOCOLS)) as pool:
        responses = [pool.submit(generate, protocol) for protocol in PROTOCOLS]
        waiting = len(PROTOCOLS) - 1
        until(lambda: queued() >= waiting, lambda: f"{waiting} requests are queued: {queued()}")
        assert not any(response.done() for response in responses)
        project.compose("stop", timeout=STOP_S)
        assert [response.result(timeout=60) for response in responses] == [TOKENS] * len(PROTOCOLS)
    # 137 would mean that Docker had to kill the container.
    assert [project.inspect(".State.ExitCode", service) for service in ("server", "openai")] == [0, 0]
    project.compose("down", timeout=STOP_S)
    assert project.containers() == []


OVERLAY = "deploy/envoy/compose.yml"
LONG = 1000


@pytest.fixture(scope="module")
def behind_envoy(engine: DockerEngine, new_project: NewProject) -> Iterator[ComposeProject]:
    """Two servers, of both compose files."""
    files = SMALL_MODEL["COMPOSE_FILE"].replace(":", f":{OVERLAY}:", 1)
    image = envoy_image(engine)
    variables = {"TRITON_TLS_PORT": "0", **({"TRITON_ENVOY_IMAGE": image} if image else {})}
    with new_project({**SMALL_MODEL, "COMPOSE_FILE": files, **variables}) as project:
        project.up()
        yield project


def _complete(address: str, tokens: int) -> httpx.Response:
    body = {"prompt": "def", "max_tokens": tokens, "min_tokens": tokens, "temperature": 2}
    return CLIENT.post(f"http://{address}/v1/completions", json=body, timeout=180)


def test_two_servers_are_up_and_envoy_alone_is_published(behind_envoy: ComposeProject) -> None:
    assert len(behind_envoy.containers("server")) == 2
    published = behind_envoy.compose("ps", "--format", "{{.Service}} {{.Publishers}}").stdout.splitlines()
    assert [line.split()[0] for line in published if "127.0.0.1" in line] == ["envoy"]
    assert not any("0.0.0.0" in line for line in published)
    assert _complete(behind_envoy.address(OPENAI, "envoy"), 1).json()["usage"]["completion_tokens"] == 1


def test_stop_answers_what_envoy_has_accepted(behind_envoy: ComposeProject) -> None:
    address = behind_envoy.address(OPENAI, "envoy")
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(_complete, address, LONG) for _ in range(4)]
        # Accepted, and far from its end.
        assert _complete(address, 1).status_code == 200
        assert not any(answer.done() for answer in answers)
        behind_envoy.compose("stop", timeout=STOP_S)
        assert [answer.result(timeout=60).json()["usage"]["completion_tokens"] for answer in answers] == [LONG] * 4
    assert [behind_envoy.inspect(".State.ExitCode", service) for service in ("envoy", "openai")] == [0, 0]
