"""Cached prefixes over Triton and the OpenAI endpoint: who finds whose, and what usage and metrics say."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from end_to_end.metrics import Metrics
from end_to_end.openai_endpoint import in_front_of
from frontend.endpoints import Endpoint, events_of
from triton_llama import LlamaClient
from triton_local.server import LocalTriton

FIRST, SECOND = "sk-first", "sk-second"


@pytest.fixture
def prompt() -> str:
    """A prompt of a few pages that no other test has sent."""
    return f"{secrets.token_hex(8)}: " + "return a list of the words in the string, " * 10


@pytest.fixture(scope="module")
def keyed(streaming: LocalTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{FIRST}\n{SECOND}\n")
    with in_front_of(streaming, api_keys_file=keys) as endpoint:
        yield endpoint


def _cached_tokens(served: Endpoint, prompt: str, key: str, *, stream: bool = False) -> int:
    body = {"model": "pydoc-llama", "prompt": prompt, "max_tokens": 2, "stream": stream}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    headers = {"authorization": f"Bearer {key}"}
    response = served.http.post("/v1/completions", json={**body, **options}, headers=headers)
    usage = events_of(response)[-1]["usage"] if stream else response.json()["usage"]
    assert isinstance(usage, dict)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(cached, int)
    assert cached < usage["prompt_tokens"]
    return cached


@pytest.mark.parametrize("stream", [False, True])
def test_usage_has_the_cached_tokens_of_a_repeated_prompt(keyed: Endpoint, prompt: str, stream: bool) -> None:
    assert _cached_tokens(keyed, prompt, FIRST, stream=stream) == 0
    assert _cached_tokens(keyed, prompt, FIRST, stream=stream) > 0


def test_a_key_finds_no_prefix_of_another_key(keyed: Endpoint, prompt: str) -> None:
    _cached_tokens(keyed, prompt, FIRST)
    assert _cached_tokens(keyed, prompt, SECOND) == 0


def test_hits_and_queries_are_counted_in_tokens(triton: LocalTriton, prompt: str) -> None:
    metrics = Metrics(triton)
    with LlamaClient(triton.http_url) as client:
        first, second = (client.generate(prompt, max_tokens=2) for _ in range(2))
    assert second.num_cached_tokens
    metrics.wait_for(second.num_cached_tokens, "llama_prefix_cache_hits_total")
    assert metrics.grown("llama_prefix_cache_queries_total") == first.num_input_tokens + second.num_input_tokens
    assert metrics.now("llama_kv_cache_pages", state="cached") > 0
