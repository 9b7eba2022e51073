"""vLLM's router in front of two endpoints: conversations go where their pages are.

OpenAI's library behind it is in test_openai_python.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import openai
import pytest
from end_to_end.clients.conftest import PAGE, POLICIES, Router
from end_to_end.clients.question import MODEL
from frontend.endpoints import Endpoint
from openai.types.chat import ChatCompletionMessageParam

CHATS, TURNS = 8, 8
LOAD = 16
"""Requests at a time, of which one endpoint gets too many."""


@pytest.fixture(params=POLICIES)
def router(request: pytest.FixtureRequest, routers: Mapping[str, Router]) -> Router:
    """A router of each policy."""
    return routers[request.param]


def _client(router: Router) -> openai.OpenAI:
    return openai.OpenAI(base_url=router.base_url, api_key="unused", max_retries=0)


def _value(series: str, endpoint: Endpoint) -> int:
    """Return a value of the endpoint's metrics."""
    values = re.findall(rf"^{re.escape(series)} (\S+)", endpoint.http.get("/metrics").text, re.MULTILINE)
    return sum(int(float(value)) for value in values)


def _answered(path: str) -> Callable[[Endpoint], int]:
    return partial(_value, f'llama_openai_requests_total{{code="200",route="{path}"}}')


def _running(router: Router) -> list[int]:
    """Return how many requests run at each endpoint."""
    return [_value("llama_openai_requests_in_flight", endpoint) for endpoint in router.endpoints]


class _Chat:
    """A conversation. found: its turns after the first that found all full pages of the turn before."""

    def __init__(self, client: openai.OpenAI, name: str) -> None:
        self._client, self._name = client, name
        self._messages: list[ChatCompletionMessageParam] = []
        self._before = self.found = 0

    def ask(self, turn: int) -> None:
        question = f"{self._name} {turn}: what does the function of this name do with the words in the list?"
        self._messages.append({"role": "user", "content": question})
        answer = self._client.chat.completions.create(
            model=MODEL, messages=self._messages, temperature=0, max_tokens=16
        )
        self._messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached = answer.usage.prompt_tokens_details.cached_tokens
        self.found += turn > 0 and (cached or 0) >= self._before // PAGE * PAGE
        self._before = answer.usage.prompt_tokens


def test_chats_behind_the_router_find_their_pages(router: Router) -> None:
    answered = _answered("/v1/chat/completions")
    before = [answered(endpoint) for endpoint in router.endpoints]
    with _client(router) as client, ThreadPoolExecutor(CHATS) as pool:
        chats = [_Chat(client, f"{router.policy} {number}") for number in range(CHATS)]
        # They begin at once, so that each endpoint gets some. Later a load would outweigh the pages of short prompts.
        list(pool.map(lambda chat: chat.ask(0), chats))
        for turn in range(1, TURNS):
            for chat in chats:
                chat.ask(turn)
    assert sum(chat.found for chat in chats) >= 0.95 * CHATS * (TURNS - 1)
    counts = [answered(endpoint) - earlier for endpoint, earlier in zip(router.endpoints, before, strict=True)]
    assert sum(counts) == CHATS * TURNS
    assert min(counts) >= TURNS


def test_a_loaded_endpoint_gives_way_to_the_one_without_the_pages(router: Router) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": f"{router.policy} has sent this before. " * 10}
    ]
    with _client(router) as client, ExitStack() as streams:
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
        # The router reads which pages that left; nothing shows when.
        time.sleep(2.0)
        for count in range(1, LOAD + 1):
            stream = client.chat.completions.create(
                model=MODEL,
                messages=messages,
                max_tokens=1500,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            next(streams.enter_context(stream))
            if count == 3:
                assert sorted(_running(router)) == [0, 3]
        assert min(_running(router)) > 0


def test_the_router_takes_the_tokens_of_prompts_from_the_endpoints(router: Router) -> None:
    rendered = _answered("/v1/chat/completions/render")
    before = sum(map(rendered, router.endpoints))
    with _client(router) as client:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}], max_tokens=2)
    assert sum(map(rendered, router.endpoints)) > before


@pytest.mark.parametrize("stream", [False, True])
def test_a_fields_refusal_passes_through_the_router(router: Router, stream: bool) -> None:
    with _client(router) as client, pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs") as error:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "a"}], top_logprobs=1, stream=stream
        )
    assert error.value.param == "top_logprobs"
