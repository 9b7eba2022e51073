"""The OpenAI endpoint with the real model: what it says is what the model says, and slots are freed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import openai
import pytest
from frontend.endpoints import HOST, Endpoint, error_of
from server.metrics import Metrics
from server.openai_endpoint import in_front_of
from triton_llama import LlamaClient
from triton_local.server import LocalTriton

MODEL = "pydoc-llama"
PROMPT = "Return a list of"


@pytest.fixture(scope="module")
def served(streaming: LocalTriton) -> Iterator[Endpoint]:
    with in_front_of(streaming) as endpoint:
        yield endpoint


@pytest.fixture
def client(served: Endpoint) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_is_the_models_own(client: openai.OpenAI, streaming: LocalTriton, stream: bool) -> None:
    with LlamaClient(streaming.grpc_url, "grpc") as direct:
        expected = direct.generate(PROMPT, max_tokens=20, temperature=0)
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    asked["extra_body"] = {"repetition_penalty": 1}
    if stream:
        chunks = client.completions.create(**asked, stream=True)  # type: ignore[call-overload]  # a dictionary
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    else:
        answer = client.completions.create(**asked)  # type: ignore[call-overload]
        assert answer.choices[0].text == expected.text
        assert answer.usage.completion_tokens == expected.num_output_tokens
        assert answer.usage.prompt_tokens == expected.num_input_tokens


def test_a_chat_answers_something(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What does textwrap.wrap do?"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)  # type: ignore[arg-type]
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.total_tokens <= 512


def test_a_prompt_beyond_the_context_is_refused_in_openais_words(served: Endpoint) -> None:
    response = served.complete(prompt="word " * 600)
    assert response.status_code == 400
    assert (error_of(response)["param"], error_of(response)["code"]) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(slow_streaming: LocalTriton, stream: bool) -> None:
    metrics = Metrics(slow_streaming)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 500, "min_tokens": 500, "stream": stream}
    with (
        in_front_of(slow_streaming) as served,
        httpx.Client(base_url=f"http://{HOST}:{served.port}", timeout=1) as leaving,
        # An answer that isn't streamed takes longer than the client waits.
        contextlib.suppress(httpx.ReadTimeout),
        leaving.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert stream
        next(response.iter_raw())
    metrics.wait_for(1, "llama_requests_total", finish_reason="cancelled")
