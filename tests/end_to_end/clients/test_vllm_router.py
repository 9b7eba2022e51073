"""vLLM's router in front of two endpoints: conversations go where their pages are.

OpenAI's library behind it is in test_openai_python.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from end_to_end.clients.conftest import Router
from end_to_end.clients.question import MODEL
from frontend.endpoints import Endpoint
from openai.types.chat import ChatCompletionMessageParam
from triton_llama_openai.triton.engine_load import PAGE_SIZES

CHATS, TURNS = 8, 8
PAGE = PAGE_SIZES["cpu"]


def _count(endpoint: Endpoint, path: str) -> int:
    """Return how many requests the endpoint has answered."""
    pattern = rf'^llama_openai_requests_total{{code="200",route="{path}"}} (\S+)'
    counts = re.findall(pattern, endpoint.http.get("/metrics").text, re.MULTILINE)
    return sum(int(float(count)) for count in counts)


def _turns_with_pages(router: Router, number: int) -> int:
    """Return in how many turns after the first a chat found all full pages of the turn before."""
    messages: list[ChatCompletionMessageParam] = []
    found = before = 0
    with openai.OpenAI(base_url=router.base_url, api_key="unused", max_retries=0) as client:
        for turn in range(TURNS):
            question = f"{number} {turn}: what does the function of this name do with the words in the list?"
            messages.append({"role": "user", "content": question})
            answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=16)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached = answer.usage.prompt_tokens_details.cached_tokens
            found += turn > 0 and (cached or 0) >= before // PAGE * PAGE
            before = answer.usage.prompt_tokens
    return found


def test_chats_behind_the_router_find_their_pages(router: Router) -> None:
    path = "/v1/chat/completions"
    before = [_count(endpoint, path) for endpoint in router.endpoints]
    with ThreadPoolExecutor(CHATS) as pool:
        found = sum(pool.map(lambda number: _turns_with_pages(router, number), range(CHATS)))
    assert found >= 0.95 * CHATS * (TURNS - 1)
    answered = [_count(endpoint, path) for endpoint in router.endpoints]
    counts = [after - earlier for after, earlier in zip(answered, before, strict=True)]
    assert sum(counts) == CHATS * TURNS
    assert min(counts) >= TURNS


def test_the_router_takes_the_tokens_of_prompts_from_the_endpoints(router: Router) -> None:
    with openai.OpenAI(base_url=router.base_url, api_key="unused", max_retries=0) as client:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}], max_tokens=2)
    assert sum(_count(endpoint, "/v1/chat/completions/render") for endpoint in router.endpoints) > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_fields_refusal_passes_through_the_router(router: Router, stream: bool) -> None:
    with (
        openai.OpenAI(base_url=router.base_url, api_key="unused", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs") as refused,
    ):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "a"}], top_logprobs=1, stream=stream
        )
    assert refused.value.param == "top_logprobs"
