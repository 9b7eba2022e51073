"""LoRA adapters: served by their names, loaded, unloaded, exchanged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
from frontend.endpoints import HOST, Endpoint, Json, check_refusal, endpoint, error_of, text_of
from frontend.fake_server import fake_triton
from frontend.fake_triton import FakeTriton
from httpx import Response
from triton_llama.endpoint import Endpoint as Address
from triton_llama_openai.triton.engine_client import EngineClient

GAUGE = 'vllm:lora_requests_info{{max_lora="1",running_lora_adapters="{}",waiting_lora_adapters="{}"}}'


@pytest.fixture
def served(own: FakeTriton) -> Iterator[Endpoint]:
    """An endpoint of a model with an adapter."""
    own.adapters["sql"] = "v1"
    with endpoint(own.port, lora_updates="on", resume_timeout=20) as served:
        yield served


def _load(served: Endpoint, **fields: object) -> Response:
    return served.http.post("/v1/load_lora_adapter", json={"lora_name": "json", "lora_path": "v1", **fields})


def _unload(served: Endpoint, name: str = "sql") -> Response:
    return served.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def _adapter(own: FakeTriton) -> tuple[object, object]:
    """Return the adapter of the last request, and its version."""
    return own.last.value("lora_name"), own.last.value("lora_digest")


@pytest.mark.parametrize("ask", [Endpoint.chat, Endpoint.complete, Endpoint.respond])
def test_a_model_name_may_be_an_adapters(served: Endpoint, own: FakeTriton, ask: Callable[..., Response]) -> None:
    assert ask(served, model="sql").json()["model"] == "sql"
    assert _adapter(own) == ("sql", "v1")
    assert ask(served).json()["model"] == "pydoc-llama"
    assert _adapter(own) == (None, None)


def test_an_adapter_is_listed_with_its_model_as_parent(served: Endpoint) -> None:
    model = served.http.get("/v1/models/sql").json()
    assert (model["root"], model["parent"], model["max_model_len"]) == ("sql", "pydoc-llama", 2048)


def test_an_adapters_texts_are_tokenized_by_its_model(served: Endpoint) -> None:
    body = {"model": "sql", "prompt": "Return a list"}
    assert served.http.post("/tokenize", json=body).json()["tokens"] == served.tokens("Return a list")


def test_fingerprint_and_replica_key_depend_on_the_adapter(served: Endpoint, own: FakeTriton) -> None:
    answers = [served.complete(model=name).json()["system_fingerprint"] for name in ("pydoc-llama", "sql")]
    assert len(set(answers)) == 2
    assert len({request.metadata["x-llama-key"] for request in own.requests}) == 2


def test_an_adapter_loaded_elsewhere_is_served_once_asked_for(served: Endpoint, own: FakeTriton) -> None:
    own.adapters["new"] = "v1"
    own.wait_for(lambda _: served.complete(model="new").status_code == 200)


def test_unknown_names_share_a_description(served: Endpoint, own: FakeTriton) -> None:
    for _ in range(5):
        assert served.complete(model="x").status_code == 404
        assert served.http.get("/v1/models/x").status_code == 404
        assert served.http.post("/tokenize", json={"model": "x", "prompt": "a"}).status_code == 404
    assert own.descriptions < 15


def test_an_adapter_unloaded_elsewhere_is_unknown(served: Endpoint, own: FakeTriton) -> None:
    del own.adapters["sql"]
    response = served.complete(model="sql")
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert str(error["message"]).startswith("model is 'sql'; it must be one of")


@pytest.fixture
def two(own: FakeTriton, tmp_path: Path) -> Iterator[Endpoint]:
    """An endpoint of the models a, without an adapter, and b, with the adapters sql and a."""
    own.adapters = {"sql": "v1", "a": "v1"}
    with fake_triton() as first:
        file = tmp_path / "models.json"
        models = [{"served_name": "a", "triton": f"{HOST}:{first.port}"}, {"served_name": "b"}]
        file.write_text(json.dumps(models))
        with endpoint(own.port, models_file=file, lora_updates="on") as two:
            yield two


def test_an_adapter_unloaded_elsewhere_is_not_listed_after_a_refusal(served: Endpoint, own: FakeTriton) -> None:
    del own.adapters["sql"]
    assert served.complete(model="sql").status_code == 404
    own.wait_for(lambda _: served.http.get("/v1/models/sql").status_code == 404)


def test_an_adapter_of_two_models_is_refused(own: FakeTriton, tmp_path: Path) -> None:
    own.adapters["sql"] = "v1"
    file = tmp_path / "models.json"
    file.write_text(json.dumps([{"served_name": name} for name in "ab"]))
    with endpoint(own.port, models_file=file) as two:
        message = str(error_of(two.complete(model="sql"))["message"])
    assert message == "model is 'sql', the name of 2 models or adapters; their names must differ"


def test_a_models_name_wins_over_its_adapters(served: Endpoint, own: FakeTriton) -> None:
    own.adapters["pydoc-llama"] = "v1"
    # The unknown name has the endpoint ask for the adapters.
    own.wait_for(lambda fake: served.complete(model="x").status_code == 404 and fake.descriptions > 1)
    assert [model["id"] for model in served.http.get("/v1/models").json()["data"]] == ["pydoc-llama", "sql"]
    assert served.complete().status_code == 200
    assert _adapter(own) == (None, None)


def test_a_models_name_wins_over_another_models_adapter(two: Endpoint, own: FakeTriton) -> None:
    assert two.complete(model="a").status_code == 200
    assert not own.requests


def test_an_adapter_of_another_models_name_is_not_listed(two: Endpoint) -> None:
    assert [model["id"] for model in two.http.get("/v1/models").json()["data"]] == ["a", "b", "sql"]


def test_a_name_of_another_models_adapter_cannot_be_loaded(two: Endpoint) -> None:
    message = "lora_name is 'sql', the name of a model or of another model's adapter"
    check_refusal(_load(two, lora_name="sql", base_model_name="a"), "lora_name", message)


@pytest.mark.parametrize(("name", "status"), [(None, 400), ("c", 404)])
def test_without_a_known_base_an_update_is_refused(two: Endpoint, name: str | None, status: int) -> None:
    response = _load(two, base_model_name=name)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (status, "base_model_name")
    assert str(error["message"]).startswith("base_model_name is ")


def test_a_loaded_adapter_is_served_with_the_answer(served: Endpoint, own: FakeTriton) -> None:
    response = _load(served, lora_int_id=7, load_inplace=False)
    assert response.text == "Success: LoRA adapter 'json' added successfully."
    assert own.updates[0].value("lora_task_id") == 7
    assert [model["id"] for model in served.http.get("/v1/models").json()["data"]] == ["pydoc-llama", "sql", "json"]


def test_updates_are_served_without_a_new_description(served: Endpoint, own: FakeTriton) -> None:
    own.hold_descriptions = True
    assert _load(served).status_code == _unload(served).status_code == 200
    assert [model["id"] for model in served.http.get("/v1/models").json()["data"]] == ["pydoc-llama", "json"]


def test_a_description_older_than_a_load_does_not_replace_its_list(own: FakeTriton) -> None:
    async def load_meanwhile() -> list[str]:
        engine = EngineClient(Address.parse(f"{HOST}:{own.port}", "grpc"), "llama")
        own.hold_descriptions = True
        describing = asyncio.create_task(engine.description("", 20))
        await asyncio.to_thread(own.wait_for, lambda fake: fake.descriptions == 1)
        await engine.load_adapter("json", "v1", None, 20)
        own.hold_descriptions = False
        await describing
        await engine.close()
        return list(engine.adapters)

    assert asyncio.run(load_meanwhile()) == ["json"]


def test_an_unloaded_adapter_is_gone_with_the_answer(served: Endpoint) -> None:
    assert _unload(served).text == "Success: LoRA adapter 'sql' removed successfully."
    assert [model["id"] for model in served.http.get("/v1/models").json()["data"]] == ["pydoc-llama"]


def test_unloading_an_unknown_adapter_is_not_found(served: Endpoint) -> None:
    response = _unload(served, "other")
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "adapter_not_found", "lora_name")


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
def test_an_adapter_that_cannot_be_loaded_is_refused(served: Endpoint, fields: Json, param: str, message: str) -> None:
    check_refusal(_load(served, **fields), param, message)


def test_without_the_setting_no_adapter_is_loaded_or_unloaded(own: FakeTriton) -> None:
    with endpoint(own.port) as served:
        assert [error_of(answer)["code"] for answer in (_load(served), _unload(served))] == ["unknown_url"] * 2
    assert not own.updates


def test_with_keys_updates_need_one(own: FakeTriton, keys: Path) -> None:
    with endpoint(own.port, lora_updates="on", api_keys_file=keys) as served:
        assert [_load(served).status_code, _unload(served).status_code] == [401, 401]


@pytest.mark.parametrize(("version", "status"), [("v2", 503), (None, 404)])
def test_an_interrupted_request_ends_if_its_adapter_has_changed(
    served: Endpoint, own: FakeTriton, version: str | None, status: int
) -> None:
    own.die_after = 2

    def exchange() -> None:
        own.wait_for(lambda fake: fake.die_after is None and not fake.running)
        own.adapters = {} if version is None else {"sql": version}
        own.start()

    thread = Thread(target=exchange)
    thread.start()
    response = served.complete(model="sql")
    thread.join()
    assert response.status_code == status
    assert "'sql'" in str(error_of(response)["message"])
    assert len(own.requests) == 1


def test_an_interrupted_request_goes_on_with_its_adapter(served: Endpoint, own: FakeTriton) -> None:
    own.die_after, own.restarts = 2, True
    assert text_of(served.complete(model="sql")) == " Hello, world."
    assert _adapter(own) == ("sql", "v1")


def test_an_exchanged_adapter_is_served_after_one_refusal(served: Endpoint, own: FakeTriton) -> None:
    own.adapters["sql"] = "v2"
    response = served.complete(model="sql")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    own.wait_for(lambda _: served.complete(model="sql").status_code == 200)
    assert _adapter(own) == ("sql", "v2")


@pytest.mark.parametrize(("hold_after", "labels"), [(0, ("", "sql")), (1, ("sql", ""))])
def test_metrics_name_the_adapters_of_requests(
    served: Endpoint, own: FakeTriton, hold_after: int, labels: tuple[str, str]
) -> None:
    def has(running: str, waiting: str) -> bool:
        return GAUGE.format(running, waiting) in served.http.get("/metrics").text

    assert has("", "")
    own.hold_after = hold_after
    with served.begin_request("/v1/completions", model="sql", prompt="a", stream=True):
        own.wait_for(lambda _: has(*labels))
    own.wait_for(lambda _: has("", ""))


def test_without_adapters_the_gauge_is_absent(own: FakeTriton) -> None:
    with endpoint(own.port) as served:
        assert "vllm:lora_requests_info{" not in served.http.get("/metrics").text
