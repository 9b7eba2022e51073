"""Metrics and the log's lines."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from frontend.endpoints import Endpoint, endpoint
from frontend.fake_triton import FakeTriton
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
        served.complete(prompt="my secret")
    logged = [record.getMessage() for record in caplog.records if "/v1/completions" in record.getMessage()]
    assert len(logged) == lines
    assert ("my secret" in caplog.text) == (log_requests == "prompts")
    assert all("completion 4 tokens" in line for line in logged)


@pytest.mark.parametrize("ask", [Endpoint.complete, Endpoint.chat])
def test_a_truncated_text_is_logged_as_a_text(
    triton: FakeTriton, caplog: pytest.LogCaptureFixture, ask: Callable[..., Response]
) -> None:
    caplog.set_level(logging.INFO, "triton_llama_openai")
    with endpoint(triton.port, log_requests="prompts") as served:
        assert ask(served, truncate_prompt_tokens=1).status_code == 200
    assert "a list" in caplog.text
