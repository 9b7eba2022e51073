"""LoRA adapters: served by their names, loaded, unloaded, exchanged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from frontend.endpoints import HOST, Endpoint, Json, check_refusal, endpoint, error_of
from frontend.fake_triton import FakeTriton
from frontend.fake_triton_grpc import fake_triton
from httpx import Response

GAUGE = 'vllm:lora_requests_info{{max_lora="2",running_lora_adapters="{}",waiting_lora_adapters="{}"}}'


@pytest.fixture
def served(own: FakeTriton) -> Iterator[Endpoint]:
    """An endpoint of a model with an adapter."""
    own.adapters["sql"] = "v1"
    with endpoint(own.port, lora_updates="on", resume_timeout=20) as served:
        yield served


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[FakeTriton, Endpoint]]:
    """A Triton that has the same adapters after each test, and an endpoint of its model alone."""
    with fake_triton() as triton:
        triton.adapters = {"sql": "v1", "a": "v1"}
        with endpoint(triton.port, lora_updates="on") as served:
            yield triton, served


@pytest.fixture
def constant(shared: tuple[FakeTriton, Endpoint]) -> FakeTriton:
    """The shared Triton, as if it had just started."""
    shared[0].reset()
    return shared[0]


@pytest.fixture
def adapted(constant: FakeTriton, shared: tuple[FakeTriton, Endpoint]) -> Endpoint:
    """The shared endpoint."""
    return shared[1]


@pytest.fixture
def two(constant: FakeTriton, triton: FakeTriton, tmp_path: Path) -> Iterator[Endpoint]:
    """An endpoint of the models a, without an adapter, and b, with the adapters sql and a."""
    file = tmp_path / "two.json"
    models = [{"served_name": "a", "triton": f"{HOST}:{triton.port}"}, {"served_name": "b"}]
    file.write_text(json.dumps(models))
    with endpoint(constant.port, models_file=file, lora_updates="on") as two:
        yield two


def _load(served: Endpoint, **fields: object) -> Response:
    return served.http.post("/v1/load_lora_adapter", json={"lora_name": "json", "lora_path": "v1", **fields})


def _unload(served: Endpoint, name: str = "sql") -> Response:
    return served.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def _adapter(own: FakeTriton) -> tuple[object, object]:
    """Return the adapter of the last request, and its version."""
    return own.last.value("lora_name"), own.last.value("lora_digest")


def _names(served: Endpoint) -> list[str]:
    return [model["id"] for model in served.http.get("/v1/models").json()["data"]]


@pytest.mark.parametrize("ask", [Endpoint.chat, Endpoint.complete, Endpoint.respond])
def test_a_model_name_may_be_an_adapters(adapted: Endpoint, constant: FakeTriton, ask: Callable[..., Response]) -> None:
    assert ask(adapted, model="sql").json()["model"] == "sql"
    assert _adapter(constant) == ("sql", "v1")
    assert ask(adapted).json()["model"] == "pydoc-llama"
    assert _adapter(constant) == (None, None)


def test_an_adapter_is_listed_and_its_texts_are_tokenized_by_its_model(adapted: Endpoint) -> None:
    model = adapted.http.get("/v1/models/sql").json()
    assert (model["root"], model["parent"], model["max_model_len"]) == ("sql", "pydoc-llama", 2048)
    assert adapted.tokenize(model="sql", prompt="Return a list") == adapted.tokens("Return a list")


def test_fingerprint_and_replica_key_depend_on_the_adapter(adapted: Endpoint, constant: FakeTriton) -> None:
    answers = [adapted.complete(model=name).json()["system_fingerprint"] for name in ("pydoc-llama", "sql")]
    assert len(set(answers)) == 2
    assert len({request.metadata["x-llama-key"] for request in constant.requests[-2:]}) == 2


def test_an_adapter_loaded_elsewhere_is_served_once_asked_for(served: Endpoint, own: FakeTriton) -> None:
    own.adapters["new"] = "v1"
    own.wait_for(lambda _: served.complete(model="new").status_code == 200)


def test_unknown_names_share_a_description(adapted: Endpoint, constant: FakeTriton) -> None:
    before = constant.descriptions
    for _ in range(5):
        assert adapted.complete(model="x").status_code == 404
        assert adapted.http.get("/v1/models/x").status_code == 404
        assert adapted.post("/tokenize", model="x", prompt="a").status_code == 404
    assert constant.descriptions < before + 15


def test_an_adapter_unloaded_elsewhere_is_unknown_and_no_longer_listed(served: Endpoint, own: FakeTriton) -> None:
    del own.adapters["sql"]
    response = served.complete(model="sql")
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert str(error["message"]).startswith("model is 'sql'; it must be one of")
    own.wait_for(lambda _: served.http.get("/v1/models/sql").status_code == 404)


def test_an_adapter_of_two_models_is_refused(constant: FakeTriton, tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    file.write_text(json.dumps([{"served_name": name} for name in "bc"]))
    with endpoint(constant.port, models_file=file) as two:
        message = str(error_of(two.complete(model="sql"))["message"])
    assert message == "model is 'sql', the name of 2 models or adapters; their names must differ"


def test_a_models_name_wins_over_its_adapters(constant: FakeTriton) -> None:
    with endpoint(constant.port, served_name="a") as served:
        assert _names(served) == ["a", "sql"]
        assert served.complete(model="a").status_code == 200
    assert _adapter(constant) == (None, None)


def test_a_models_name_wins_over_another_ones_adapter(two: Endpoint, triton: FakeTriton, constant: FakeTriton) -> None:
    assert _names(two) == ["a", "b", "sql"]
    assert two.complete(model="a").status_code == 200
    assert (len(triton.requests), len(constant.requests)) == (1, 0)


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"base_model_name": None}, 400, "base_model_name", "base_model_name is missing"),
        ({"base_model_name": "c"}, 404, "base_model_name", "base_model_name is 'c'"),
        ({"base_model_name": "a"}, 400, "lora_name", "lora_name is 'sql', the name of a model or of another model's"),
    ],
)
def test_an_update_without_its_model_or_a_free_name_is_refused(
    two: Endpoint, fields: Json, status: int, param: str, message: str
) -> None:
    response = _load(two, lora_name="sql", **fields)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (status, param)
    assert str(error["message"]).startswith(message)


def test_an_update_is_answered_as_by_vllm(adapted: Endpoint, constant: FakeTriton) -> None:
    response = _load(adapted, lora_int_id=7, load_inplace=False)
    assert response.text == "Success: LoRA adapter 'json' added successfully."
    assert constant.updates[0].value("lora_task_id") == 7
    assert _unload(adapted, "json").text == "Success: LoRA adapter 'json' removed successfully."


def test_updates_are_served_before_and_after_an_older_description(served: Endpoint, own: FakeTriton) -> None:
    own.hold_descriptions, asked = True, own.descriptions

    def asks_for_a_description(fake: FakeTriton) -> bool:
        # An unknown name waits for one.
        return served.complete(model="x").status_code == 404 and fake.descriptions > asked

    own.wait_for(asks_for_a_description)
    assert _load(served).status_code == 200
    assert _names(served) == ["pydoc-llama", "sql", "json"]
    assert _unload(served).status_code == 200
    assert _names(served) == ["pydoc-llama", "json"]
    own.hold_descriptions = False
    assert served.complete(model="x").status_code == 404
    assert _names(served) == ["pydoc-llama", "json"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"lora_path": "damaged"}, "lora_path", "lora_path is 'damaged'; it must be a folder"),
        ({"lora_name": "a b"}, "lora_name", "lora_name is 'a b'; it must match pattern"),
        ({"lora_name": "pydoc-llama"}, "lora_name", "the name of a model"),
        ({"lora_path": ""}, "lora_path", "lora_path is ''"),
        ({"load_inplace": True}, "load_inplace", "load_inplace is True"),
    ],
)
def test_what_cannot_be_loaded_is_refused(adapted: Endpoint, fields: Json, param: str, message: str) -> None:
    check_refusal(_load(adapted, **fields), param, message)


def test_an_unknown_adapter_cannot_be_unloaded(adapted: Endpoint) -> None:
    unknown = error_of(_unload(adapted, "other"))
    assert (unknown["code"], unknown["param"]) == ("adapter_not_found", "lora_name")


def test_without_the_setting_no_adapter_is_loaded_or_unloaded(triton: FakeTriton, shared_endpoint: Endpoint) -> None:
    answers = [_load(shared_endpoint), _unload(shared_endpoint)]
    assert [error_of(answer)["code"] for answer in answers] == ["unknown_url"] * 2
    assert not triton.updates
    assert "vllm:lora_requests_info{" not in shared_endpoint.http.get("/metrics").text


@pytest.mark.parametrize(("adapters", "status"), [({"sql": "v2"}, 503), ({}, 404)])
def test_an_interrupted_request_ends_if_its_adapter_has_changed(
    served: Endpoint, own: FakeTriton, adapters: dict[str, str], status: int
) -> None:
    own.die_after, own.restart = 2, lambda: setattr(own, "adapters", adapters)
    response = served.complete(model="sql")
    assert response.status_code == status
    assert "'sql'" in str(error_of(response)["message"])
    assert len(own.requests) == 1


def test_an_exchanged_adapter_is_served_after_one_refusal(served: Endpoint, own: FakeTriton) -> None:
    own.adapters["sql"] = "v2"
    response = served.complete(model="sql")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    own.wait_for(lambda _: served.complete(model="sql").status_code == 200)
    assert _adapter(own) == ("sql", "v2")


@pytest.mark.parametrize(("hold_after", "labels"), [(0, ("", "sql")), (1, ("sql", ""))])
def test_metrics_name_the_adapters_of_requests(
    adapted: Endpoint, constant: FakeTriton, hold_after: int, labels: tuple[str, str]
) -> None:
    def has(running: str, waiting: str) -> bool:
        return GAUGE.format(running, waiting) in adapted.http.get("/metrics").text

    assert has("", "")
    constant.hold_after = hold_after
    with adapted.begin_request("/v1/completions", model="sql", prompt="a", stream=True):
        constant.wait_for(lambda _: has(*labels))
    constant.hold_after = None
    constant.wait_for(lambda _: has("", ""))
