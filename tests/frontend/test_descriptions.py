"""The description of the served model: awaited at the start, asked for again, exchanged."""

from __future__ import annotations

import json
from threading import Thread

import pytest
from frontend.descriptions import changed
from frontend.endpoints import HOST, Endpoint, Json, endpoint, error_of, text_of
from frontend.fake_triton import FakeTriton


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are looked at more often than once a minute."""
    monkeypatch.setattr("triton_llama_openai.served.triton_model._CHECK_S", 0.1)


def _context(served: Endpoint) -> int:
    (model,) = served.http.get("/v1/models").json()["data"]
    return int(model["max_model_len"])


def _until_exchanged(served: Endpoint, own: FakeTriton) -> None:
    own.wait_for(lambda _: _context(served) == 64)


def test_a_model_is_served_once_its_triton_describes_it(own: FakeTriton) -> None:
    own.kill()
    with endpoint(own.port) as served:
        for response in (served.chat(model=None), served.http.get("/v1/models"), served.complete(model="mine")):
            error = error_of(response)
            assert (response.status_code, error["code"]) == (503, "engine_unavailable")
            assert response.headers["retry-after"] == "1"
            assert f"llama is not served yet: no connection to grpc://{HOST}:" in str(error["message"])
        assert f"no connection to grpc://{HOST}:{own.port}" in served.http.get("/health").json()["not_ready"]["llama"]
        assert served.http.get("/health/live").status_code == 200
        own.start()
        own.wait_for(lambda _: served.complete().status_code == 200)
        assert served.http.get("/health").status_code == 200


def test_a_server_without_descriptions_is_named_in_one_line(own: FakeTriton, caplog: pytest.LogCaptureFixture) -> None:
    own.models.clear()
    with endpoint(own.port) as served:
        message = str(error_of(served.complete())["message"])
        # The endpoint asks once more.
        asked = own.descriptions
        own.wait_for(lambda fake: fake.descriptions > asked + 1)
    assert f"the model llama of grpc://{HOST}:{own.port} has no description for this endpoint" in message
    assert "unexpected inference input 'description_digest'" in message
    assert caplog.text.count("has no description") == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tokenizer": "{"}, "the tokenizer of pydoc-llama can't be loaded"),
        ({"chat_templates": {"default": "{% if %}"}}, "a chat template of pydoc-llama can't be compiled"),
        ({"format": 2}, "format is 2; it must be 1"),
    ],
)
def test_an_unusable_description_is_the_reason(own: FakeTriton, fields: dict[str, object], reason: str) -> None:
    own.models["llama"] = changed(**fields)
    with endpoint(own.port) as served:
        assert reason in str(error_of(served.complete())["message"])
        assert reason in served.http.get("/health").json()["not_ready"]["llama"]


def test_no_request_runs_on_another_model_than_it_was_prepared_for(own: FakeTriton) -> None:
    with endpoint(own.port) as served:
        fingerprint = served.complete().json()["system_fingerprint"]
        own.models["llama"] = changed(max_model_len=64)
        # Else the endpoint may serve it before the second request.
        own.hold_descriptions = True
        for stream in (False, True):
            response = served.complete(stream=stream)
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            assert "another model is served" in str(error_of(response)["message"])
        assert len(own.requests) == 1
        own.hold_descriptions = False
        _until_exchanged(served, own)
        assert served.complete().json()["system_fingerprint"] != fingerprint


@pytest.mark.usefixtures("often")
def test_an_unchanged_description_is_not_sent_again(own: FakeTriton) -> None:
    with endpoint(own.port):
        own.wait_for(lambda fake: fake.descriptions > 1)
    assert own.whole_descriptions == 1


def test_an_interrupted_request_does_not_go_on_with_another_model(own: FakeTriton) -> None:
    other = {"llama": changed(max_model_len=64)}
    with endpoint(own.port, resume_timeout=3) as served:
        own.die_after, own.restart = 1, lambda: own.models.update(other)
        response = served.complete()
        assert response.status_code == 503
        assert str(error_of(response)["message"]).endswith("another model is served")
        assert len(own.requests) == 1
        _until_exchanged(served, own)


def test_an_interrupted_request_waits_for_its_own_model(own: FakeTriton) -> None:
    def exchange() -> None:
        """Have another model until the endpoint has asked for it."""
        model, known = own.models["llama"], own.whole_descriptions
        own.models["llama"] = changed(max_model_len=64)
        Thread(target=exchange_back, args=(model, known)).start()

    def exchange_back(model: Json, known: int) -> None:
        own.wait_for(lambda fake: fake.whole_descriptions > known)
        own.models["llama"] = model

    with endpoint(own.port, resume_timeout=20) as served:
        own.die_after, own.restart = 1, exchange
        assert text_of(served.complete()) == " Hello, world."


@pytest.mark.usefixtures("often")
def test_an_exchanged_model_is_noticed_and_a_stream_in_flight_keeps_its_own(own: FakeTriton) -> None:
    own.hold_after = 2
    body = {"prompt": "a", "stream": True}
    with endpoint(own.port) as served, served.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        first = next(lines)
        own.models["llama"] = changed(name="new", max_model_len=64)
        _until_exchanged(served, own)
        own.hold_after = None
        events = [line for line in (first, *lines) if line]
        assert error_of(served.complete())["code"] == "model_not_found"
        assert served.complete(model="new").status_code == 200
    assert events.pop() == "data: [DONE]"
    assert {json.loads(event.removeprefix("data: "))["model"] for event in events} == {"pydoc-llama"}
