"""The OpenAI endpoint with the real model: what it says is what the model says; and embeddings over every endpoint.

The protocol's forms and refusals are tested with a small Triton in tests/frontend.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

import numpy as np
import openai
import pytest
from end_to_end.servers import EMBEDDED, in_front_of
from end_to_end.wires import ask, generate
from engine.engines import engine_of, load
from frontend.endpoints import Endpoint, events_of
from llama_engine.engine.events import Completion
from llama_engine.request.generation_request import GenerationRequest
from numpy.typing import NDArray
from triton_llama import AsyncLlamaClient, LlamaClient
from triton_local.server import LocalTriton

PROMPT = "Return a list of"


def test_a_completion_is_the_models_own_streamed_or_not(served: Endpoint, streaming: LocalTriton) -> None:
    greedy = {"max_tokens": 20, "temperature": 0, "repetition_penalty": 1}
    expected = ask(streaming, generate, text_input=PROMPT, **greedy)
    answer = served.complete(prompt=PROMPT, **greedy).json()
    assert answer["choices"][0]["text"] == expected.text
    assert answer["usage"]["completion_tokens"] == expected.num_output_tokens
    assert answer["usage"]["prompt_tokens"] == expected.num_input_tokens
    events = events_of(served.complete(prompt=PROMPT, stream=True, **greedy))
    assert "".join(event["choices"][0]["text"] for event in events) == expected.text  # type: ignore[index]


@pytest.mark.parametrize("stream", [False, True])
def test_refused_requests_leave_no_error_in_tritons_log(served: Endpoint, streaming: LocalTriton, stream: bool) -> None:
    before = _error_lines(streaming)
    for _ in range(10):
        assert served.complete(max_tokens=3000, stream=stream).status_code == 400
    # What Triton has logged about them is there once a later request is answered.
    assert served.complete(max_tokens=2).status_code == 200
    assert _error_lines(streaming) == before


def _error_lines(server: LocalTriton) -> list[str]:
    """Return Triton's own lines of the level error."""
    return re.findall(r"^E\d{4} .*", server.log_text(), re.MULTILINE)


def test_a_repeated_prompt_is_cached_for_its_key_alone(streaming: LocalTriton, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-first\nsk-second\n")
    # A few pages that no other test has sent.
    prompt = f"{secrets.token_hex(8)}: " + "return a list of the words in the string, " * 10
    with in_front_of(streaming, api_keys_file=tmp_path / "keys") as endpoint:

        def cached(key: str) -> int:
            body = {"model": "pydoc-llama", "prompt": prompt, "max_tokens": 2}
            headers = {"authorization": f"Bearer {key}"}
            usage = endpoint.http.post("/v1/completions", json=body, headers=headers).json()["usage"]
            tokens = int(usage["prompt_tokens_details"]["cached_tokens"])
            assert tokens < usage["prompt_tokens"]
            return tokens

        assert cached("sk-first") == 0
        assert cached("sk-first") > 0
        assert cached("sk-second") == 0


TEXTS = [f"{word} is a statement of Python" for word in ("while", "for", "return", "É 🙂", "pass", "with")] * 3


@pytest.fixture(scope="module")
def expected() -> NDArray[np.float32]:
    """The embedding of each text by an engine in this process, [texts, size]."""
    engine = engine_of(load("int8", model=str(EMBEDDED), pooling="mean"))
    tokens = [engine.tokenizer.encode(text) for text in TEXTS]
    results = engine.generate(GenerationRequest("", each, max_tokens=0, return_embedding=True) for each in tokens)
    return np.array([result.embedding for result in results if isinstance(result, Completion)], dtype=np.float32)


async def test_embed_returns_the_same_bits_for_a_text_anywhere(
    triton: LocalTriton, streaming: LocalTriton, expected: NDArray[np.float32]
) -> None:
    with LlamaClient(triton.http_address, "http") as client:
        assert np.array_equal(client.embed(TEXTS), expected)
    async with AsyncLlamaClient(streaming.grpc_address, "grpc") as twin:
        assert np.array_equal(await twin.embed(TEXTS), expected)


def test_the_openai_endpoint_returns_those_bits_alone_and_among_others(
    served: Endpoint, expected: NDArray[np.float32]
) -> None:
    with openai.OpenAI(base_url=served.base_url, api_key="unused") as client:

        def embed(inputs: str | list[str] | list[list[int]]) -> NDArray[np.float32]:
            data = client.embeddings.create(model="pydoc-llama", input=inputs).data
            return np.array([part.embedding for part in data], dtype=np.float32)

        assert np.array_equal(embed(TEXTS[0]), expected[:1])
        assert np.array_equal(embed(TEXTS * 2), [*expected, *expected])
        assert np.array_equal(embed([served.tokens(text) for text in TEXTS[:3]]), expected[:3])
