"""Variables in the user's .env reach the container; unset ones do not, and neither do compose's own."""

from __future__ import annotations

import json

import pytest
from compose.conftest import NewProject
from compose.project import HTTP, SERVICE

FROM_CONFTEST = {"OMP_NUM_THREADS": "1"}
FOR_THE_SERVER = {"LLAMA_MODEL": "meta-llama/Llama-2-7b-chat-hf", "HF_TOKEN": "hf_secret", "LLAMA_SLOTS": "16"}
FOR_COMPOSE = {"TRITON_BIND_ADDRESS": "127.0.0.1", "TRITON_SHM_SIZE": "2gb"}


@pytest.mark.parametrize(
    ("given", "reaching"), [({}, {}), ({**FOR_THE_SERVER, **FOR_COMPOSE}, FOR_THE_SERVER)], ids=["nothing", "both"]
)
def test_only_the_servers_variables_that_are_set_reach_the_container(
    new_project: NewProject, given: dict[str, str], reaching: dict[str, str]
) -> None:
    with new_project(given) as project:
        service = json.loads(project.compose("config", "--format", "json").stdout)["services"][SERVICE]
    environment = {name: value for name, value in service["environment"].items() if value is not None}
    assert environment == {**FROM_CONFTEST, **reaching}


def test_the_named_config_is_served_and_an_empty_setting_means_its_default(new_project: NewProject) -> None:
    with new_project({"TRITON_MODEL_CONFIG": "batched_int8", "LLAMA_MODEL": ""}) as project:
        project.up()
        config = json.loads(project.get(HTTP, "/v2/models/llama/config"))
    assert config["max_batch_size"] == 8
