"""Embeddings over every endpoint of a real Triton, by the client library and by OpenAI's."""

from __future__ import annotations

import numpy as np
import openai
import pytest
from end_to_end.servers import EMBEDDED
from end_to_end.wires import post
from engine.engines import engine_of, load
from frontend.endpoints import Endpoint
from llama_engine.engine.events import Completion
from llama_engine.request.generation_request import GenerationRequest
from numpy.typing import NDArray
from triton_llama import AsyncLlamaClient, LlamaClient
from triton_local.server import LocalTriton

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


def test_generate_returns_an_embedding_as_json(streaming: LocalTriton, expected: NDArray[np.float32]) -> None:
    answer = post(streaming, "generate", {"text_input": TEXTS[0], "return_embedding": True}).json()
    assert np.array_equal(np.array(answer["embedding"], dtype=np.float32), expected[0])
    assert (answer["text_output"], answer["finish_reason"], answer["num_output_tokens"]) == ("", "stop", 0)
    assert answer["num_input_tokens"] > 1


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
