"""Embeddings over every endpoint of a real Triton, by the client library and by OpenAI's."""

from __future__ import annotations

import numpy as np
import openai
import pytest
import tritonclient.grpc
from end_to_end.servers import EMBEDDED
from end_to_end.test_client import address, both_protocols
from end_to_end.wires import UNARY, post, tensors
from engine.engines import engine_of, load
from frontend.endpoints import Endpoint, check_refusal
from llama_engine.engine.events import Completion
from llama_engine.request.parser import GenerationRequest
from numpy.typing import NDArray
from triton_llama import AsyncLlamaClient, LlamaClient, RejectedInputError
from triton_llama.endpoint import Protocol
from triton_local.server import LocalTriton

TEXTS = [f"{word} is a statement of Python" for word in ("while", "for", "return", "É 🙂", "pass", "with")] * 3


@pytest.fixture(scope="module")
def expected() -> NDArray[np.float32]:
    """The embedding of each text by an engine in this process, [texts, size]."""
    engine = engine_of(load("int8", model=str(EMBEDDED), pooling="mean"))
    tokens = [engine.tokenizer.encode(text) for text in TEXTS]
    results = engine.generate(GenerationRequest("", each, max_tokens=0, return_embedding=True) for each in tokens)
    return np.array([result.embedding for result in results if isinstance(result, Completion)], dtype=np.float32)


@both_protocols
async def test_embed_returns_the_same_bits_for_a_text_anywhere(
    either: LocalTriton, protocol: Protocol, expected: NDArray[np.float32]
) -> None:
    with LlamaClient(address(either, protocol), protocol) as client:
        assert np.array_equal(client.embed(TEXTS), expected)
    async with AsyncLlamaClient(address(either, protocol), protocol) as twin:
        assert np.array_equal(await twin.embed(TEXTS), expected)


def test_generate_returns_an_embedding_as_json(either: LocalTriton, expected: NDArray[np.float32]) -> None:
    answer = post(either, "generate", {"text_input": TEXTS[0], "return_embedding": True}).json()
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


@pytest.mark.parametrize(("path", "field"), [("/v1/embeddings", "input"), ("/v1/completions", "prompt")])
def test_an_error_names_the_prompt_of_a_list(served: Endpoint, path: str, field: str) -> None:
    refusal = served.http.post(path, json={field: ["a", "word " * 5000, "b"]})
    check_refusal(refusal, f"{field}[1]", f"{field}[1] is ")


def test_a_batch_of_texts_has_a_row_for_each(streaming: LocalTriton, expected: NDArray[np.float32]) -> None:
    texts, flags = [[text] for text in TEXTS[:6]], [[True]] * 6
    inputs = tensors(tritonclient.grpc.InferInput, {"text_input": texts, "return_embedding": flags})
    with tritonclient.grpc.InferenceServerClient(streaming.grpc_url) as client:
        assert np.array_equal(client.infer(UNARY, inputs).as_numpy("embedding"), expected[:6])


def test_an_embedding_is_refused_where_pooling_is_off(batched_int8: LocalTriton) -> None:
    with (
        LlamaClient(batched_int8.grpc_url, "grpc") as client,
        pytest.raises(RejectedInputError, match="return_embedding is true; it must be false: the setting"),
    ):
        client.embed(TEXTS[:1])
