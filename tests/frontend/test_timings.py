"""`timings`: the engine's times of a request, under llama.cpp's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from frontend.endpoints import Endpoint, endpoint, events_of
from frontend.fake_triton import FakeTriton
from httpx import Response

Ask = Callable[..., Response]
PATHS = [Endpoint.chat, Endpoint.complete, Endpoint.respond, Endpoint.message]


@pytest.fixture
def restarted(own: FakeTriton) -> Iterator[Endpoint]:
    """An endpoint in front of a Triton that dies after two responses, and is there again at once."""
    own.die_after, own.restarts = 2, True
    with endpoint(own.port) as served:
        yield served


@pytest.mark.parametrize("ask", PATHS)
def test_an_answer_has_the_timings_that_its_request_asks_for(served: Endpoint, triton: FakeTriton, ask: Ask) -> None:
    triton.cached_tokens, triton.draft_tokens = 1, (2, 3)
    timings = ask(served, timings=True).json()["timings"]
    computed = triton.last.prompt_tokens - 1
    assert timings.pop("queue_ms") > 0
    assert timings == {
        "cache_n": 1,
        "prompt_n": computed,
        "prompt_ms": 0.02,
        "prompt_per_second": computed * 50_000,
        # Three tokens after the first one.
        "predicted_n": 4,
        "predicted_ms": 0.03,
        "predicted_per_second": 100_000,
        "draft_n": 5,
        "draft_n_accepted": 2,
    }


@pytest.mark.parametrize("ask", PATHS)
def test_an_answer_has_no_timings_by_default(served: Endpoint, ask: Ask) -> None:
    assert "timings" not in ask(served).json()


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
@pytest.mark.parametrize("ask", PATHS[:2])
def test_a_stream_has_its_timings_in_the_last_event(
    served: Endpoint, ask: Ask, options: dict[str, bool] | None
) -> None:
    *events, last = events_of(ask(served, timings=True, stream=True, stream_options=options))
    assert (last["choices"], "usage" in last) == ([], options is not None)
    assert isinstance(last["timings"], dict)
    assert last["timings"]["predicted_n"] == 4
    assert not any("timings" in event for event in events)


def test_timings_of_several_choices_span_all_of_them(served: Endpoint) -> None:
    timings = served.complete(n=2, timings=True).json()["timings"]
    assert (timings["prompt_ms"], timings["predicted_ms"], timings["predicted_n"]) == (0.03, 0.04, 8)


def test_one_token_has_no_rate(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = [" a"]
    assert served.complete(timings=True).json()["timings"]["predicted_per_second"] is None


@pytest.mark.parametrize("ask", PATHS)
def test_a_resumed_answer_has_null_as_timings(restarted: Endpoint, ask: Ask) -> None:
    assert ask(restarted, timings=True).json()["timings"] is None
