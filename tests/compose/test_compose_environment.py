"""The user's .env: what is set there reaches the container, what isn't set leaves no trace, ports stay outside."""

from __future__ import annotations

import http.client
import json

from compose.conftest import NewProject
from compose.project import SERVICE, ComposeProject

FROM_CONFTEST = {"OMP_NUM_THREADS": "1"}


def container_environment(project: ComposeProject) -> dict[str, str | None]:
    service = json.loads(project.compose("config", "--format", "json").stdout)["services"][SERVICE]
    return {name: value for name, value in service["environment"].items() if value is not None}


def test_nothing_reaches_the_container_when_nothing_is_set(new_project: NewProject) -> None:
    with new_project({}) as project:
        assert container_environment(project) == FROM_CONFTEST


def test_settings_of_the_model_reach_the_container_and_settings_of_compose_do_not(new_project: NewProject) -> None:
    given = {"LLAMA_MODEL": "meta-llama/Llama-2-7b-chat-hf", "HF_TOKEN": "hf_secret", "LLAMA_SLOTS": "16"}
    with new_project({**given, "TRITON_BIND_ADDRESS": "127.0.0.1", "TRITON_SHM_SIZE": "2gb"}) as project:
        assert container_environment(project) == {**FROM_CONFTEST, **given}


def test_another_config_is_served_when_it_is_named_and_an_empty_setting_is_its_default(new_project: NewProject) -> None:
    with new_project({"TRITON_MODEL_CONFIG": "batched_int8", "LLAMA_MODEL": ""}) as project:
        project.up()
        host, _, port = project.address(8000).partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=10)
        try:
            connection.request("GET", "/v2/models/llama/config")
            config = json.loads(connection.getresponse().read())
        finally:
            connection.close()
    assert config["max_batch_size"] == 8
