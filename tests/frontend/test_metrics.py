"""Metrics, the log's lines, and `timings`: the engine's times of a request, under llama.cpp's names."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from frontend.endpoints import Endpoint, endpoint, events_of
from frontend.fake_triton import FakeTriton, unchanged
from httpx import Response


def test_metrics_count_requests_by_route_with_their_tokens(triton: FakeTriton) -> None:
    with endpoint(triton.port) as served:
        served.chat()
        served.chat(stream=True)
        served.chat(temperature=9)
        served.http.get("/v1/made/up")
        # A stream is counted once its last chunk is sent, and its client may be quicker.
        counted = 'llama_openai_request_seconds_count{route="/v1/chat/completions"} 3.0'
        triton.wait_for(lambda _: counted in served.http.get("/metrics").text)
        page = served.http.get("/metrics").text
    prompt = 2 * triton.last.prompt_tokens
    for line in (
        'llama_openai_requests_total{code="200",route="/v1/chat/completions"} 2.0',
        'llama_openai_requests_total{code="400",route="/v1/chat/completions"} 1.0',
        'llama_openai_requests_total{code="404",route="unmatched"} 1.0',
        'llama_openai_time_to_first_token_seconds_count{route="/v1/chat/completions"} 1.0',
        counted,
        f'llama_openai_tokens_total{{kind="prompt"}} {prompt}.0',
        'llama_openai_tokens_total{kind="completion"} 8.0',
    ):
        assert line in page.splitlines()


@pytest.mark.parametrize(("log_requests", "lines"), [("none", 0), ("summary", 1), ("prompts", 1)])
def test_a_prompt_is_logged_only_under_the_setting_prompts(
    triton: FakeTriton, caplog: pytest.LogCaptureFixture, log_requests: str, lines: int
) -> None:
    caplog.set_level(logging.INFO, "triton_llama_openai")
    with endpoint(triton.port, log_requests=log_requests) as served:
        caplog.clear()
        # Truncated to its last words, it is logged as a text.
        served.complete(prompt="This is my secret", truncate_prompt_tokens=len(served.tokens(" my secret")) - 1)
    logged = [record.getMessage() for record in caplog.records if "/v1/completions" in record.getMessage()]
    assert len(logged) == lines
    assert ("my secret" in caplog.text) == (log_requests == "prompts")
    assert all("completion 4 tokens" in line for line in logged)


Ask = Callable[..., Response]
PATHS = [Endpoint.chat, Endpoint.complete, Endpoint.respond, Endpoint.message]


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


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
@pytest.mark.parametrize("ask", PATHS[:2])
def test_a_streams_timings_are_in_the_last_event(served: Endpoint, ask: Ask, options: dict[str, bool] | None) -> None:
    *events, last = events_of(ask(served, timings=True, stream=True, stream_options=options))
    assert (last["choices"], "usage" in last) == ([], options is not None)
    assert isinstance(last["timings"], dict)
    assert last["timings"]["predicted_n"] == 4
    assert not any("timings" in event for event in events)


def test_timings_of_several_choices_span_all_of_them(served: Endpoint) -> None:
    timings = served.complete(n=2, timings=True).json()["timings"]
    assert (timings["prompt_ms"], timings["predicted_ms"], timings["predicted_n"]) == (0.03, 0.04, 8)
    # One token has no rate.
    assert served.complete(max_tokens=1, timings=True).json()["timings"]["predicted_per_second"] is None


def test_a_resumed_answer_has_null_as_timings(own: FakeTriton) -> None:
    own.die_after, own.restart = 2, unchanged
    with endpoint(own.port) as served:
        assert served.chat(timings=True).json()["timings"] is None
