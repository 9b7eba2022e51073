"""The served models: their list, their readiness, their fingerprints."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import triton_llama.endpoint
from frontend.endpoints import EMBEDDED, HOST, Endpoint, Json, check_refusal, endpoint, error_of
from frontend.fake_triton import FakeTriton, fake_triton
from triton_llama_openai.prompt.tokenizer import load_checkpoint
from triton_llama_openai.routes.models import Models, ServedModel
from triton_llama_openai.triton.engine_client import EngineClient
from triton_llama_openai.triton.load_balancer import LoadBalancer


class _Engine(EngineClient):
    """Answers once all expected questions have come."""

    def __init__(self, together: asyncio.Barrier) -> None:
        super().__init__(triton_llama.endpoint.Endpoint.parse("localhost:1", "grpc"), "llama")
        self._together = together
        self.configs = 0

    async def is_ready(self, timeout: float) -> bool:
        await self._together.wait()
        return False

    async def config(self, timeout: float) -> bytes:
        self.configs += 1
        await self._together.wait()
        return b"config"


def _model(name: str, *engines: EngineClient) -> ServedModel:
    return ServedModel(name, load_checkpoint(str(EMBEDDED), None, None), LoadBalancer(engines, 0), "hermes")


def test_all_models_are_probed_at_the_same_time() -> None:
    async def ask() -> dict[str, str]:
        together = asyncio.Barrier(2)
        async with asyncio.timeout(20):
            return await Models([_model(name, _Engine(together)) for name in ("a", "b")]).ready()

    assert list(asyncio.run(ask())) == ["a", "b"]


def test_the_models_are_listed_with_their_context(served: Endpoint) -> None:
    (model,) = served.http.get("/v1/models").json()["data"]
    assert model["id"] == "pydoc-llama"
    assert model["max_model_len"] == 2048
    assert (model["root"], model["parent"]) == ("pydoc-llama", None)
    assert served.http.get("/v1/models/pydoc-llama").json() == model
    assert error_of(served.http.get("/v1/models/other"))["code"] == "model_not_found"


def test_several_checkpoints_are_served_by_name(triton: FakeTriton, tmp_path: Path) -> None:
    with fake_triton() as other:
        other.tokens = [" Other"]
        file = tmp_path / "models.json"
        entries = [
            {"served_name": "org/first", "triton": f"{HOST}:{triton.port}", "tokenizer": str(EMBEDDED)},
            {"served_name": "second", "triton": f"{HOST}:{other.port}", "tokenizer": str(EMBEDDED)}
            | {"max_model_len": 64},
        ]
        file.write_text(json.dumps(entries))
        with endpoint(0, models_file=file) as served:
            listed = served.http.get("/v1/models").json()["data"]
            assert [(model["id"], model["max_model_len"]) for model in listed] == [("org/first", 2048), ("second", 64)]
            assert served.http.get("/v1/models/org/first").status_code == 200
            assert served.complete(model="org/first").json()["choices"][0]["text"] == " Hello, world."
            assert served.complete(model="second").json()["choices"][0]["text"] == " Other"
            check_refusal(served.complete(model=None), "model", "model is missing; it must be one of org/first, second")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a", "model": None}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_the_only_model_needs_no_name(served: Endpoint, path: str, body: Json) -> None:
    assert served.http.post(path, json=body).json()["model"] == "pydoc-llama"


def test_the_endpoint_lives_without_a_triton() -> None:
    with fake_triton() as gone:
        port = gone.port
    with endpoint(port, resume_timeout=0) as served:
        assert served.http.get("/health/live").status_code == 200
        response = served.chat()
        assert response.status_code == 503
        assert error_of(response)["code"] == "engine_unavailable"
        assert served.http.get("/health").status_code == 503


def test_a_model_is_ready_if_any_of_its_tritons_is(triton: FakeTriton) -> None:
    with fake_triton() as other, endpoint(0, triton=f"{HOST}:{triton.port},{HOST}:{other.port}") as served:
        triton.ready = False
        assert served.http.get("/health").status_code == 200
        other.kill()
        response = served.http.get("/health")
        assert response.status_code == 503
        reasons = response.json()["not_ready"]["pydoc-llama"]
        assert f"the model llama of grpc://{HOST}:{triton.port} is not ready; " in reasons
        assert f"no connection to grpc://{HOST}:{other.port}" in reasons


def test_the_fingerprint_is_that_of_any_triton_that_answers(triton: FakeTriton) -> None:
    with endpoint(triton.port) as served:
        expected = served.complete().json()["system_fingerprint"]
    with fake_triton() as gone:
        addresses = f"{HOST}:{gone.port},{HOST}:{triton.port}"
    with endpoint(0, triton=addresses) as served:
        assert served.complete().json()["system_fingerprint"] == expected


def test_configs_that_differ_are_logged(triton: FakeTriton, caplog: pytest.LogCaptureFixture) -> None:
    with fake_triton() as other, endpoint(0, triton=f"{HOST}:{triton.port},{HOST}:{other.port}") as served:
        other.config = "another"
        served.complete()
    assert caplog.text.count("the model's configs differ between its Tritons") == 1
