"""vLLM's router in front of two endpoints: conversations go where their pages are."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import openai
from end_to_end.clients.conftest import PAGE, Router
from end_to_end.clients.question import MODEL
from frontend.endpoints import Endpoint
from openai.types.chat import ChatCompletionMessageParam

CHATS, TURNS = 8, 8


def _client(router: Router) -> openai.OpenAI:
    return openai.OpenAI(base_url=router.base_url, api_key="unused", max_retries=0)


def _value(series: str, endpoint: Endpoint) -> int:
    """Return a value of the endpoint's metrics."""
    values = re.findall(rf"^{re.escape(series)} (\S+)", endpoint.http.get("/metrics").text, re.MULTILINE)
    return sum(int(float(value)) for value in values)


def _answered(path: str) -> Callable[[Endpoint], int]:
    return partial(_value, f'llama_openai_requests_total{{code="200",route="{path}"}}')


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
        chats = [_Chat(client, f"{number}") for number in range(CHATS)]
        # They begin at once, so that each endpoint gets some. Later a load would outweigh the pages of short prompts.
        list(pool.map(lambda chat: chat.ask(0), chats))
        for turn in range(1, TURNS):
            for chat in chats:
                chat.ask(turn)
    assert sum(chat.found for chat in chats) >= 0.95 * CHATS * (TURNS - 1)
    counts = [answered(endpoint) - earlier for endpoint, earlier in zip(router.endpoints, before, strict=True)]
    assert sum(counts) == CHATS * TURNS
    assert min(counts) >= TURNS
