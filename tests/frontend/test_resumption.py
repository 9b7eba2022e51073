"""Requests whose Triton is lost: they go on elsewhere, or wait, and their clients see nothing of it."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from frontend.endpoints import HOST, Json, error_of
from frontend.fake_triton import FIRST_ID, FakeTriton
from frontend.pairs import Pair, homed, in_front_of, resumptions_of, text_of
from httpx import Response
from triton_llama_openai.triton.resumption import MAX_FAILURES

STOPPING = "STOPPING: the server is stopping"
FULL = "Exceeds maximum queue size"
CALL = ["Look: ", "<tool_call>", '{"name": "f", ', '"arguments": {}}', "</tool_call>"]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def _by_seed(seed: int) -> list[str]:
    return [f" {seed % 2**32}a", " b", f" {seed % 2**32}c", " d"]


def _answer(response: Response) -> list[str]:
    """Return an answer's lines without what differs from request to request, those of each choice together."""
    assert response.status_code == 200, response.text
    lines = re.sub(r'"id":"[^"]*"|"created":[0-9]+', "", response.text).split("\n")
    return sorted(lines, key=lambda line: re.findall(r'"index":[0-9]+', line)[:1])


@contextmanager
def _restarted(triton: FakeTriton, once_down: FakeTriton) -> Iterator[None]:
    """Start a Triton again as soon as this one, which has its time of death, is down."""

    def restart() -> None:
        once_down.wait_for(_is_down)
        triton.start()

    thread = threading.Thread(target=restart)
    thread.start()
    yield
    thread.join()


def _is_down(triton: FakeTriton) -> bool:
    return triton.die_after is None and not triton.running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["complete", "chat"])
@pytest.mark.parametrize(
    "fields",
    [
        {"return_token_ids": True},
        {"logprobs": 1},
        {"n": 2, "seed": 5},
        {"stop": "wor", "max_tokens": 9},
        {"response_format": {"type": "json_object"}},
        {"tools": TOOLS, "tool_choice": "auto"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_an_interrupted_answer_is_the_uninterrupted_one(pair: Pair, path: str, fields: Json, stream: bool) -> None:
    for triton in pair:
        triton.cached_tokens, triton.draft_tokens = 2, (2, 1)
        triton.tokens = CALL if "tools" in fields else triton.tokens
        triton.by_seed = _by_seed if "n" in fields else None
    if path == "chat" and "logprobs" in fields:
        fields = {"logprobs": True, "top_logprobs": 1}
    if stream:
        fields = {**fields, "stream_options": {"include_usage": True}}
    if path == "complete" and "tools" in fields:
        fields = {"prompt": [1, 2, 3], "echo": True}
    with in_front_of(*pair) as served:
        ask: Callable[..., Response] = getattr(served, path)
        whole = _answer(ask(stream=stream, **fields))
        home, other = sorted(pair, key=lambda triton: -len(triton.requests))
        home.die_after = 2
        assert _answer(ask(stream=stream, **fields)) == whole
        assert len(other.requests) == fields.get("n", 1)
        # A stream's client may be quicker than the count.
        home.wait_for(lambda _: resumptions_of(served) == {"resumed": 1})


def test_a_resumed_request_is_the_same_with_its_tokens_and_seed(pair: Pair) -> None:
    with homed(pair) as (served, home, other):
        home.die_after = 2
        answer = served.complete(seed=9, temperature=1.0, prompt_logprobs=0).json()
    (first,), (resumed,) = home.requests, other.requests
    assert resumed.id == first.id
    assert resumed.inputs.pop("resume_ids") == [FIRST_ID, FIRST_ID + 1]
    # They have come with the first token.
    assert first.inputs.pop("prompt_logprobs") == [0]
    assert resumed.inputs == first.inputs
    assert answer["choices"][0]["prompt_logprobs"][1]["0"]["decoded_token"] == " a"


def test_a_resumed_request_has_its_prediction(pair: Pair) -> None:
    for triton in pair:
        # The other Triton generates the two tokens that are missing.
        triton.die_after = 2
    with in_front_of(*pair) as served:
        assert served.chat(prediction={"type": "content", "content": "a b"}).status_code == 200
    assert [request.value("prediction") for triton in pair for request in triton.requests] == ["a b", "a b"]


def test_a_resumed_choice_has_the_seed_it_was_drawn_with(pair: Pair) -> None:
    with homed(pair) as (served, home, other):
        home.die_after = 2
        served.complete()
    assert other.last.value("seed") == home.last.value("seed")


def test_choices_that_have_not_begun_are_drawn_again_from_the_requests_seed(pair: Pair) -> None:
    for triton in pair:
        triton.by_seed, triton.one_by_one = _by_seed, True
    with homed(pair) as (served, home, other):
        whole = served.complete(n=3).json()["choices"]
        home.die_after = 5
        seed = home.last.integer("seed", 0)
        choices = served.complete(n=3, seed=seed).json()["choices"]
    assert choices == whole
    # The first choice is finished, the second one continues, the third one is one of three again.
    assert sorted(len(request.inputs.get("resume_ids", [])) for request in other.requests) == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_a_token_is_sent_elsewhere_as_it_was(pair: Pair, stream: bool) -> None:
    with homed(pair) as (served, home, other):
        home.die_after = 0
        assert "world" in served.complete(stream=stream, n=2).text
    assert other.last.inputs == home.last.inputs


@pytest.mark.parametrize(
    ("message", "after_tokens"), [(STOPPING, 0), (STOPPING, 2), ("Stub process 'llama_0_0' is not healthy.", 1)]
)
def test_a_triton_that_drains_or_is_broken_hands_its_requests_over(pair: Pair, message: str, after_tokens: int) -> None:
    with homed(pair) as (served, home, _):
        home.failing, home.after_tokens = message, after_tokens
        assert text_of(served.complete()) == " Hello, world."


@pytest.mark.parametrize(
    ("message", "after_tokens", "status"),
    [
        ("INTERNAL: decoding failed; the server's log has the reason", 2, 500),
        ("INVALID_ARG: max_tokens is 600; it must be at most 507", 0, 400),
    ],
)
def test_a_request_that_fails_or_is_refused_is_sent_once(
    pair: Pair, message: str, after_tokens: int, status: int
) -> None:
    for triton in pair:
        triton.failing, triton.after_tokens = message, after_tokens
    with in_front_of(*pair) as served:
        assert served.complete().status_code == status
    assert sum(len(triton.requests) for triton in pair) == 1


def test_the_only_triton_is_waited_for(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "triton_llama_openai")
    triton, _ = pair
    with in_front_of(triton) as served:
        triton.die_after = 2
        with _restarted(triton, triton):
            assert text_of(served.complete()) == " Hello, world."
        assert resumptions_of(served) == {"waited": 1}
    assert triton.probes
    (request,) = {request.id for request in triton.requests}
    assert f"request {request}: interrupted at grpc://{HOST}:{triton.port}: no connection" in caplog.text
    assert "completion 4 tokens, waited 1 times" in caplog.text


def test_a_request_without_any_triton_waits_for_one(pair: Pair) -> None:
    triton, _ = pair
    with in_front_of(triton) as served:
        triton.kill()
        threading.Timer(0.3, triton.start).start()
        assert text_of(served.complete()) == " Hello, world."


def test_a_request_may_be_resumed_several_times(pair: Pair) -> None:
    with homed(pair) as (served, home, other):
        # Of its own responses.
        home.die_after, other.die_after = 1, 1
        with _restarted(home, other):
            assert text_of(served.complete()) == " Hello, world."
    assert [len(request.inputs.get("resume_ids", [])) for request in home.requests] == [0, 2]


@pytest.mark.parametrize(("resume_timeout", "outcome"), [(0, {}), (0.2, {"given_up": 1})])
def test_without_a_triton_in_time_the_error_is_the_interruptions(
    pair: Pair, resume_timeout: float, outcome: dict[str, float]
) -> None:
    triton, _ = pair
    with in_front_of(triton, resume_timeout=resume_timeout) as served:
        triton.die_after = 2
        response = served.complete()
        assert response.status_code == 503
        assert error_of(response)["code"] == "engine_unavailable"
        assert served.complete(stream=True).status_code == 503
        triton.start()
        triton.wait_for(lambda _: served.complete().status_code == 200)
        assert resumptions_of(served).get("given_up", 0) >= outcome.get("given_up", 0)
        assert bool(resumptions_of(served)) == bool(outcome)


def test_a_wait_within_a_stream_ends_with_the_error_as_its_last_event(pair: Pair) -> None:
    triton, _ = pair
    with in_front_of(triton, resume_timeout=0.2) as served:
        triton.die_after = 2
        response = served.complete(stream=True)
    assert response.status_code == 200
    assert '"code":"engine_unavailable"' in response.text.strip().split("\n\n")[-1]


def test_the_requests_own_time_bounds_the_wait(pair: Pair) -> None:
    triton, _ = pair
    with in_front_of(triton, request_timeout=0.7) as served:
        triton.die_after = 2
        response = served.complete()
    assert response.status_code == 504
    assert "within 0.7 s" in str(error_of(response)["message"])


def test_a_request_that_finds_a_full_queue_is_sent_to_the_others(pair: Pair) -> None:
    with homed(pair) as (served, home, _):
        home.failing = FULL
        assert text_of(served.complete()) == " Hello, world."
        assert resumptions_of(served) == {}
        assert not home.probes


def test_a_request_that_finds_all_queues_full_is_refused(pair: Pair) -> None:
    for triton in pair:
        triton.failing = FULL
    with in_front_of(*pair) as served:
        response = served.complete()
    assert (response.status_code, error_of(response)["code"]) == (503, "overloaded")
    assert [len(triton.requests) for triton in pair] == [1, 1]


def test_an_interrupted_request_waits_for_room_in_a_full_queue(pair: Pair) -> None:
    with homed(pair) as (served, home, other):
        other.failing = FULL
        home.die_after = 2

        def make_room() -> None:
            other.wait_for(lambda fake: bool(fake.requests))
            other.failing = None

        making_room = threading.Thread(target=make_room)
        making_room.start()
        assert text_of(served.complete()) == " Hello, world."
        making_room.join()


def test_a_client_that_leaves_during_the_wait_leaves_nothing_behind(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    triton, _ = pair
    with in_front_of(triton) as served:
        triton.die_after = 2
        with served.begin_request("/v1/completions", prompt="a"):
            triton.wait_for(lambda _: "interrupted at" in caplog.text)
        line = 'llama_openai_requests_total{code="499",route="/v1/completions"} 1.0'
        triton.wait_for(lambda _: line in served.http.get("/metrics").text)
        triton.start()
        triton.wait_for(lambda fake: fake.probes > 0 and not fake.running)
        assert len(triton.requests) == 1


@pytest.mark.parametrize("path", ["complete", "chat", "respond"])
def test_a_model_that_cannot_stream_answers_at_once(pair: Pair, path: str) -> None:
    triton, _ = pair
    triton.decoupled = False
    with in_front_of(triton) as served:
        response: Response = getattr(served, path)()
        assert " Hello, world." in response.text
        assert not triton.last.inputs.keys() & {"stream", "stream_interval_ms"}


def test_a_request_that_ends_every_triton_is_given_up(pair: Pair) -> None:
    for triton in pair:
        triton.text = lambda request: [" a"] if request.id == "probe" else _lose_the_process()
    with in_front_of(*pair) as served:
        response = served.complete()
        assert response.status_code == 500
        assert "Stub process" in str(error_of(response)["message"])
    assert sum(len(triton.requests) for triton in pair) == MAX_FAILURES + 1


def _lose_the_process() -> list[str]:
    raise ValueError("Stub process 'llama_0_0' is not healthy")
