"""The served models: their list and their readiness."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from frontend.descriptions import changed
from frontend.endpoints import HOST, Endpoint, check_refusal, endpoint, error_of, text_of
from frontend.fake_triton import FakeTriton
from frontend.fake_triton_grpc import fake_triton
from httpx import Response


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
            sizes = {model["id"]: model["max_model_len"] for model in listed}
            assert [*sizes.items()] == [("org/first", 2048), ("pydoc-llama", 64)]
            assert served.http.get("/v1/models/org/first").status_code == 200
            assert text_of(served.complete(model="org/first")) == " Hello, world."
            assert text_of(served.complete(model="pydoc-llama")) == " Other"
            message = "model is missing; it must be one of org/first, pydoc-llama"
            check_refusal(served.complete(model=None), "model", message)


PATHS = [Endpoint.chat, Endpoint.complete, Endpoint.respond, Endpoint.message]


@pytest.mark.parametrize("ask", PATHS)
def test_the_only_model_needs_no_name(served: Endpoint, ask: Callable[..., Response]) -> None:
    assert ask(served, model=None).json()["model"] == "pydoc-llama"


def test_a_model_that_only_embeds_refuses_to_generate(triton: FakeTriton) -> None:
    triton.models["embedder"] = changed(tasks=["embed"])
    with endpoint(triton.port, triton_model="embedder") as served:
        for ask in PATHS:
            response = ask(served)
            assert response.status_code == 400
            assert "model is 'pydoc-llama', which generates no text" in response.json()["error"]["message"]


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
