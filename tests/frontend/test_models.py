"""The served models: their list and their readiness."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from frontend.descriptions import changed
from frontend.endpoints import HOST, Endpoint, Json, check_refusal, endpoint, error_of
from frontend.fake_server import fake_triton
from frontend.fake_triton import FakeTriton


def test_the_models_are_listed_with_their_context(served: Endpoint) -> None:
    (model,) = served.http.get("/v1/models").json()["data"]
    assert model["id"] == "pydoc-llama"
    assert model["max_model_len"] == 2048
    assert (model["root"], model["parent"], model["tasks"]) == ("pydoc-llama", None, ["generate", "embed"])
    assert served.http.get("/v1/models/pydoc-llama").json() == model
    assert error_of(served.http.get("/v1/models/other"))["code"] == "model_not_found"


def test_several_models_are_served_by_name(triton: FakeTriton, tmp_path: Path) -> None:
    with fake_triton() as other:
        other.tokens = [" Other"]
        other.models["llama"] = changed(max_model_len=64)
        file = tmp_path / "models.json"
        file.write_text(json.dumps([{"served_name": "org/first"}, {"triton": f"{HOST}:{other.port}"}]))
        with endpoint(triton.port, models_file=file) as served:
            listed = served.http.get("/v1/models").json()["data"]
            assert [(model["id"], model["max_model_len"]) for model in listed] == [
                ("org/first", 2048),
                ("pydoc-llama", 64),
            ]
            assert served.http.get("/v1/models/org/first").status_code == 200
            assert served.complete(model="org/first").json()["choices"][0]["text"] == " Hello, world."
            assert served.complete(model="pydoc-llama").json()["choices"][0]["text"] == " Other"
            check_refusal(
                served.complete(model=None), "model", "model is missing; it must be one of org/first, pydoc-llama"
            )


generating_paths = pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a", "model": None}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ],
)


@generating_paths
def test_the_only_model_needs_no_name(served: Endpoint, path: str, body: Json) -> None:
    assert served.http.post(path, json=body).json()["model"] == "pydoc-llama"


@generating_paths
def test_a_model_that_only_embeds_refuses_to_generate(own: FakeTriton, path: str, body: Json) -> None:
    own.models["llama"] = changed(tasks=["embed"])
    with endpoint(own.port) as served:
        response = served.http.post(path, json=body)
    assert response.status_code == 400
    assert "model is 'pydoc-llama', which generates no text" in response.json()["error"]["message"]


def test_a_name_that_two_models_have_is_refused(triton: FakeTriton, tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    file.write_text("[{}, {}]")
    with endpoint(triton.port, models_file=file) as served:
        error = error_of(served.complete())
    assert error["message"] == "model is 'pydoc-llama', the name of 2 models or adapters; their names must differ"


def test_a_model_is_ready_if_its_triton_says_so(own: FakeTriton) -> None:
    with endpoint(own.port) as served:
        assert served.http.get("/health").status_code == 200
        assert served.http.get("/ping").status_code == 200
        own.ready = False
        response = served.http.get("/health")
        assert response.status_code == 503
        assert served.http.get("/ping").json() == response.json()
        reason = f"the model llama of grpc://{HOST}:{own.port} is not ready"
        assert response.json() == {"not_ready": {"pydoc-llama": reason}}
        own.kill()
        assert "no connection to" in served.http.get("/health").json()["not_ready"]["pydoc-llama"]
