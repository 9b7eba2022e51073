"""Requests whose Triton is lost: they wait for it, or the one in its place, and their clients see nothing of it."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from frontend.endpoints import HOST, Endpoint, Json, endpoint, error_of, resumptions_of, text_of
from frontend.fake_triton import FakeTriton, unchanged
from frontend.model_messages import FIRST_ID
from httpx import Response
from triton_llama_openai.triton.resumption import MAX_FAILURES

STOPPING = "STOPPING: the server is stopping"
FULL = "Exceeds maximum queue size"
CALL = ["Look: ", "<tool_call>", '{"name": "f", ', '"arguments": {}}', "</tool_call>"]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture
def served(own: FakeTriton) -> Iterator[Endpoint]:
    """An endpoint in front of a Triton that restarts at once when it dies."""
    own.restart = unchanged
    with endpoint(own.port, resume_timeout=20) as served:
        yield served


def _by_seed(seed: int) -> list[str]:
    return [f" {seed % 2**32}a", " b", f" {seed % 2**32}c", " d"]


def _answer(response: Response) -> list[str]:
    """Return an answer's lines without what differs from request to request, those of each choice together."""
    assert response.status_code == 200, response.text
    lines = re.sub(r'"id":"[^"]*"|"created":[0-9]+', "", response.text).split("\n")
    return sorted(lines, key=lambda line: re.findall(r'"index":[0-9]+', line)[:1])


@pytest.mark.parametrize(
    ("ask", "fields"),
    [
        (Endpoint.chat, {"logprobs": True, "top_logprobs": 1}),
        (Endpoint.chat, {"n": 2, "seed": 5, "stream": True}),
        (Endpoint.chat, {"tools": TOOLS, "tool_choice": "auto"}),
        (Endpoint.chat, {"tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}}),
        (Endpoint.complete, {"prompt": [1, 2, 3], "echo": True, "return_token_ids": True}),
        (Endpoint.complete, {"logprobs": 1, "stream": True, "stream_options": {"include_usage": True}}),
        (Endpoint.complete, {"stop": "wor", "max_tokens": 9}),
        (Endpoint.complete, {"n": 2, "seed": 5}),
    ],
)
def test_an_interrupted_answer_is_the_uninterrupted_one(
    served: Endpoint, own: FakeTriton, ask: Callable[..., Response], fields: Json
) -> None:
    own.cached_tokens, own.draft_tokens = 2, (2, 1)
    own.tokens = CALL if "tools" in fields else own.tokens
    own.by_seed = _by_seed if "n" in fields else None
    whole = _answer(ask(served, **fields))
    own.die_after = 2
    assert _answer(ask(served, **fields)) == whole
    # A stream's client may be quicker than the count.
    own.wait_for(lambda _: resumptions_of(served) == {"resumed": 1})


def test_a_resumed_request_is_the_same_with_its_tokens_and_seed(served: Endpoint, own: FakeTriton) -> None:
    own.die_after = 2
    prediction = {"type": "content", "content": "a b"}
    answer = served.chat(temperature=1.0, prompt_logprobs=0, prediction=prediction).json()
    first, resumed = own.requests
    assert resumed.id == first.id
    assert resumed.inputs.pop("resume_ids") == [FIRST_ID, FIRST_ID + 1]
    # They have come with the first token.
    assert first.inputs.pop("prompt_logprobs") == [0]
    assert resumed.inputs == first.inputs
    assert first.inputs.keys() > {"seed", "prediction"}
    assert answer["prompt_logprobs"][1]


def test_a_proxy_gets_another_key_with_every_try(served: Endpoint, own: FakeTriton) -> None:
    own.failing, own.failures = STOPPING, 2
    served.complete()
    served.complete()
    first, second, third, other = (str(request.metadata["x-llama-key"]) for request in own.requests)
    assert len({first, second, third}) == 3
    assert other == first


def test_choices_that_have_not_begun_are_drawn_again_from_the_requests_seed(served: Endpoint, own: FakeTriton) -> None:
    own.by_seed, own.one_by_one = _by_seed, True
    whole = served.complete(n=3).json()["choices"]
    own.die_after = 5
    choices = served.complete(n=3, seed=own.last.integer("seed", 0)).json()["choices"]
    assert choices == whole
    # The first choice is finished, the second one continues, the third one is one of three again.
    assert sorted(len(request.inputs.get("resume_ids", [])) for request in own.requests[2:]) == [0, 1]


def test_a_request_without_a_token_is_sent_again_as_it_was(served: Endpoint, own: FakeTriton) -> None:
    own.die_after = 0
    assert "world" in served.complete(stream=True, n=2).text
    first, again = own.requests
    assert again.inputs == first.inputs


@pytest.mark.parametrize(("message", "after_tokens"), [(STOPPING, 2), ("Stub process 'llama_0_0' is not healthy.", 1)])
def test_a_request_goes_on_after_a_triton_that_drains_or_is_broken(
    served: Endpoint, own: FakeTriton, message: str, after_tokens: int
) -> None:
    own.failing, own.after_tokens, own.failures = message, after_tokens, 1
    assert text_of(served.complete()) == " Hello, world."
    assert resumptions_of(served) == {"resumed": 1}


@pytest.mark.parametrize(
    ("message", "after_tokens", "status"),
    [("INTERNAL: decoding failed; the server's log has the reason", 2, 500), (FULL, 0, 503)],
)
def test_a_request_that_fails_or_is_refused_is_sent_once(
    served: Endpoint, own: FakeTriton, message: str, after_tokens: int, status: int
) -> None:
    own.failing, own.after_tokens = message, after_tokens
    assert served.complete().status_code == status
    assert len(own.requests) == 1


def test_no_unready_triton_gets_a_request(served: Endpoint, own: FakeTriton, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "triton_llama_openai")

    def load_slowly() -> None:
        own.ready = False
        threading.Timer(0.5, lambda: setattr(own, "ready", True)).start()

    own.die_after, own.restart = 2, load_slowly
    assert text_of(served.complete()) == " Hello, world."
    assert len(own.requests) == 2
    assert f"request {own.last.id}: interrupted at grpc://{HOST}:{own.port}: no connection" in caplog.text
    # The line follows the answer.
    own.wait_for(lambda _: "completion 4 tokens, resumed 1 times" in caplog.text)


def test_a_request_may_be_resumed_several_times(served: Endpoint, own: FakeTriton) -> None:
    def die_again() -> None:
        own.die_after, own.restart = 1, unchanged

    own.die_after, own.restart = 1, die_again
    assert text_of(served.complete()) == " Hello, world."
    assert [len(request.inputs.get("resume_ids", [])) for request in own.requests] == [0, 1, 2]


@pytest.mark.parametrize(("resume_timeout", "outcome"), [(0, {}), (0.2, {"given_up": 1})])
def test_without_a_triton_in_time_the_error_is_the_interruptions(
    own: FakeTriton, resume_timeout: float, outcome: dict[str, float]
) -> None:
    with endpoint(own.port, resume_timeout=resume_timeout) as served:
        own.die_after = 2
        response = served.complete()
        assert response.status_code == 503
        assert error_of(response)["code"] == "engine_unavailable"
        assert resumptions_of(served) == outcome
        assert served.complete(stream=True).status_code == 503
        own.start()
        own.wait_for(lambda _: served.complete().status_code == 200)
        own.die_after = 2
        response = served.complete(stream=True)
    assert response.status_code == 200
    # Once tokens were sent, the error is the stream's last event.
    assert '"code":"engine_unavailable"' in response.text.strip().split("\n\n")[-1]


def test_the_requests_own_time_bounds_the_wait(own: FakeTriton) -> None:
    with endpoint(own.port, resume_timeout=20, request_timeout=0.7) as served:
        own.die_after = 2
        response = served.complete()
    assert response.status_code == 504
    assert "within 0.7 s" in str(error_of(response)["message"])


def test_an_interrupted_request_waits_for_room_in_a_full_queue(served: Endpoint, own: FakeTriton) -> None:
    def fill() -> None:
        own.failing, own.failures = FULL, 1

    own.die_after, own.restart = 2, fill
    assert text_of(served.complete()) == " Hello, world."
    assert len(own.requests) == 3


def test_a_client_that_leaves_during_the_wait_leaves_nothing_behind(
    served: Endpoint, own: FakeTriton, caplog: pytest.LogCaptureFixture
) -> None:
    own.restart, own.die_after = None, 2
    with served.begin_request("/v1/completions", prompt="a"):
        own.wait_for(lambda _: "interrupted at" in caplog.text)
    line = 'llama_openai_requests_total{code="499",route="/v1/completions"} 1.0'
    own.wait_for(lambda _: line in served.http.get("/metrics").text)
    own.start()
    own.wait_for(lambda _: served.complete().status_code == 200)
    assert len(own.requests) == 2


def test_a_model_that_cannot_stream_answers_at_once(served: Endpoint, own: FakeTriton) -> None:
    own.decoupled = False
    assert " Hello, world." in served.chat().text
    assert not own.last.inputs.keys() & {"stream", "stream_interval_ms"}


def test_a_request_that_ends_every_model_is_given_up(served: Endpoint, own: FakeTriton) -> None:
    own.failing = "Stub process 'llama_0_0' is not healthy."
    began = time.monotonic()
    response = served.complete()
    assert response.status_code == 500
    assert "Stub process" in str(error_of(response)["message"])
    assert len(own.requests) == MAX_FAILURES + 1
    # A supervisor has ended a Triton before that whose model's process is gone.
    assert time.monotonic() > began + 3
