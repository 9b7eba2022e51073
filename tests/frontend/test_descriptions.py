"""The description of the served model: awaited at the start, asked for again, exchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from threading import Thread

import pytest
from frontend.descriptions import changed
from frontend.endpoints import HOST, Endpoint, Json, endpoint, error_of
from frontend.fake_triton import FakeTriton, fake_triton
from frontend.pairs import Pair, in_front_of, text_of
from httpx import Response

REJECTED = "INVALID_ARG: top_k is 9; it must be less"


@pytest.fixture
def own() -> Iterator[FakeTriton]:
    """A Triton whose model can be exchanged: no other test's endpoint asks it."""
    with fake_triton() as triton:
        yield triton


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are looked at more often than once a minute."""
    monkeypatch.setattr("triton_llama_openai.routes.backend._CHECK_S", 0.1)


def _context(served: Endpoint) -> int:
    (model,) = served.http.get("/v1/models").json()["data"]
    return int(model["max_model_len"])


def _until_exchanged(served: Endpoint, own: FakeTriton) -> None:
    own.wait_for(lambda _: _context(served) == 64)


@pytest.mark.parametrize("name", [None, "mine"])
def test_without_a_description_requests_are_refused_with_the_reason(own: FakeTriton, name: str | None) -> None:
    own.kill()
    with endpoint(own.port, served_name=name) as served:
        for response in (served.chat(model=name), served.http.get("/v1/models"), served.complete(model="mine")):
            error = error_of(response)
            assert (response.status_code, error["code"]) == (503, "engine_unavailable")
            assert response.headers["retry-after"] == "1"
            assert f"{name or 'llama'} is not served yet: no connection to grpc://{HOST}:" in str(error["message"])
        reasons = served.http.get("/health").json()["not_ready"]
        assert f"no connection to grpc://{HOST}:{own.port}" in reasons[name or "llama"]
        assert served.http.get("/health/live").status_code == 200


def test_a_model_is_served_once_its_triton_describes_it(own: FakeTriton) -> None:
    own.kill()
    with endpoint(own.port) as served:
        assert served.complete().status_code == 503
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
def test_a_description_that_cannot_be_used_is_the_reason(
    own: FakeTriton, fields: dict[str, object], reason: str
) -> None:
    own.models["llama"] = changed(**fields)
    with endpoint(own.port) as served:
        assert reason in str(error_of(served.complete())["message"])
        assert reason in served.http.get("/health").json()["not_ready"]["llama"]


def test_an_exchanged_model_is_noticed_when_it_rejects_a_request(own: FakeTriton) -> None:
    with endpoint(own.port) as served:
        fingerprint = served.complete().json()["system_fingerprint"]
        own.models["llama"] = changed(max_model_len=64)
        own.failing = REJECTED
        assert served.complete().status_code == 400
        own.failing = None
        _until_exchanged(served, own)
        assert served.complete().json()["system_fingerprint"] != fingerprint


@pytest.mark.usefixtures("often")
def test_an_exchanged_model_is_noticed_after_a_minute(own: FakeTriton) -> None:
    with endpoint(own.port) as served:
        own.models["llama"] = changed(name="new", max_model_len=64)
        _until_exchanged(served, own)
        assert error_of(served.complete())["code"] == "model_not_found"
        assert served.complete(model="new").status_code == 200


@pytest.mark.usefixtures("often")
def test_an_unchanged_description_is_not_sent_again(own: FakeTriton) -> None:
    with endpoint(own.port):
        own.wait_for(lambda fake: fake.descriptions > 1)
    assert own.whole_descriptions == 1


def _interrupt(own: FakeTriton, served: Endpoint, description: Json | None = None) -> Response:
    """Return the answer to a request whose Triton dies after a token, and comes back with a description."""

    def restart() -> None:
        own.wait_for(lambda fake: fake.die_after is None and not fake.running)
        own.models["llama"] = description or own.models["llama"]
        own.start()

    own.die_after = 1
    restarting = Thread(target=restart)
    restarting.start()
    response = served.complete()
    restarting.join()
    return response


def test_a_request_does_not_go_on_with_another_model(own: FakeTriton) -> None:
    with endpoint(own.port, resume_timeout=20) as served:
        response = _interrupt(own, served, changed(max_model_len=64))
        assert response.status_code == 503
        assert str(error_of(response)["message"]).endswith("since then another model is served")
        # The replica takes requests only after it has said what it serves.
        assert len(own.requests) == 1
        assert _context(served) == 64


def test_a_request_goes_on_with_the_same_model(own: FakeTriton) -> None:
    with endpoint(own.port, resume_timeout=20) as served:
        assert text_of(_interrupt(own, served)) == " Hello, world."
    assert own.whole_descriptions == 1


@pytest.mark.usefixtures("often")
def test_a_request_in_flight_ends_as_it_began(own: FakeTriton) -> None:
    own.hold_after = 2
    body = {"prompt": "a", "stream": True}
    with endpoint(own.port) as served, served.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        first = next(lines)
        own.models["llama"] = changed(name="new", max_model_len=64)
        _until_exchanged(served, own)
        own.hold_after = None
        events = [line for line in (first, *lines) if line]
    assert events.pop() == "data: [DONE]"
    assert {json.loads(event.removeprefix("data: "))["model"] for event in events} == {"pydoc-llama"}


def test_descriptions_that_differ_are_logged_once(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair[1].models["llama"] = changed(max_model_len=64)
    with in_front_of(*pair):
        pass
    assert caplog.text.count("the model's descriptions differ between its Tritons") == 1


@pytest.mark.usefixtures("often")
def test_the_description_in_use_stays_while_a_triton_has_it(pair: Pair) -> None:
    with in_front_of(*pair) as served:
        pair[0].models["llama"] = changed(max_model_len=64)
        asked = pair[0].descriptions
        pair[0].wait_for(lambda fake: fake.descriptions > asked + 1)
        assert _context(served) == 2048
        pair[1].models["llama"] = pair[0].models["llama"]
        _until_exchanged(served, pair[0])


def test_the_description_in_use_goes_with_the_last_triton_that_has_it(pair: Pair) -> None:
    pair[1].models["llama"] = changed(max_model_len=64)
    with in_front_of(*pair) as served:
        context = _context(served)
        (home,) = [triton for triton in pair if triton.models["llama"]["max_model_len"] == context]
        home.kill()
        home.wait_for(lambda _: _context(served) != context)


def test_any_triton_that_answers_can_describe_the_model(pair: Pair) -> None:
    pair[0].kill()
    with in_front_of(*pair) as served:
        assert served.complete().status_code == 200


def test_a_triton_that_was_gone_is_asked_without_a_request(own: FakeTriton) -> None:
    with endpoint(own.port) as served:
        own.kill()
        own.models["llama"] = changed(max_model_len=64)
        own.start()
        _until_exchanged(served, own)
