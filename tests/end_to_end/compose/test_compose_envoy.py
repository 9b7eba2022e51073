"""`docker compose -f docker-compose.yml -f deploy/envoy/compose.yml up`: two servers behind Envoy."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from end_to_end.compose.conftest import NewProject
from end_to_end.compose.docker_engine import OPENAI, STOP_S, ComposeProject, DockerEngine
from end_to_end.compose.images import envoy_image
from end_to_end.compose.test_compose_ends import SMALL_MODEL
from end_to_end.servers import HTTP as CLIENT

OVERLAY = "deploy/envoy/compose.yml"
TOKENS = 1000


@pytest.fixture(scope="module")
def project(engine: DockerEngine, new_project: NewProject) -> Iterator[ComposeProject]:
    files = SMALL_MODEL["COMPOSE_FILE"].replace(":", f":{OVERLAY}:", 1)
    image = envoy_image(engine)
    variables = {"TRITON_TLS_PORT": "0", **({"TRITON_ENVOY_IMAGE": image} if image else {})}
    with new_project({**SMALL_MODEL, "COMPOSE_FILE": files, **variables}) as project:
        project.up()
        yield project


def _complete(address: str, tokens: int, **fields: object) -> httpx.Response:
    body = {"prompt": "def", "max_tokens": tokens, "min_tokens": tokens, "temperature": 2, **fields}
    return CLIENT.post(f"http://{address}/v1/completions", json=body, timeout=180)


def test_two_servers_are_up_and_envoy_alone_is_published(project: ComposeProject) -> None:
    assert len(project.containers("server")) == 2
    published = project.compose("ps", "--format", "{{.Service}} {{.Publishers}}").stdout.splitlines()
    assert [line.split()[0] for line in published if "127.0.0.1" in line] == ["envoy"]
    assert not any("0.0.0.0" in line for line in published)
    assert _complete(project.address(OPENAI, "envoy"), 1).json()["usage"]["completion_tokens"] == 1


def test_stop_answers_what_envoy_has_accepted(project: ComposeProject) -> None:
    address = project.address(OPENAI, "envoy")
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(_complete, address, TOKENS) for _ in range(4)]
        # Accepted, and far from its end.
        assert _complete(address, 1).status_code == 200
        assert not any(answer.done() for answer in answers)
        project.compose("stop", timeout=STOP_S)
        assert [answer.result(timeout=60).json()["usage"]["completion_tokens"] for answer in answers] == [TOKENS] * 4
    assert [project.inspect(".State.ExitCode", service) for service in ("envoy", "openai")] == [0, 0]
