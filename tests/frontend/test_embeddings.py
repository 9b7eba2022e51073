"""/v1/embeddings: every form of input and of vector, bounds, and what becomes of requests that are cut short."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
from frontend.descriptions import changed, description_of
from frontend.endpoints import Endpoint, Json, check_refusal, endpoint, error_of
from frontend.fake_triton import FakeTriton, unchanged
from frontend.model_messages import embedding_of
from httpx import Response
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

MODEL = "pydoc-llama"


def _embed(served: Endpoint, **fields: object) -> Response:
    return served.post("/v1/embeddings", **{"input": "a list", **fields})


def _vectors(response: Response) -> list[list[float]]:
    data = response.json()["data"]
    assert [part["index"] for part in data] == list(range(len(data)))
    return [part["embedding"] for part in data]


@pytest.mark.parametrize(
    ("form", "lengths"),
    [("a list", [2]), (["a", "a b c", "a b"], [1, 3, 2]), ([5, 6, 7], [3]), ([[5, 6], [7]], [2, 1])],
)
def test_every_form_of_input_has_its_vectors_in_order(served: Endpoint, form: object, lengths: list[int]) -> None:
    answer = _embed(served, input=form)
    assert np.allclose(_vectors(answer), [embedding_of(length) for length in lengths])
    assert answer.json()["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}


def test_the_library_reads_base64_as_the_same_numbers(served: Endpoint) -> None:
    client = openai.OpenAI(base_url=served.base_url, api_key="unused", max_retries=0)
    (default,) = client.embeddings.create(model=MODEL, input="a list").data
    (floats,) = client.embeddings.create(model=MODEL, input="a list", encoding_format="float").data
    assert default.embedding == floats.embedding
    assert np.allclose(default.embedding, embedding_of(2))


def test_dimensions_are_the_first_ones_normalized_again(served: Endpoint, triton: FakeTriton) -> None:
    (vector,) = _vectors(_embed(served, dimensions=2, priority=5))
    assert np.allclose(vector, [2 / math.sqrt(8), 2 / math.sqrt(8)])
    assert triton.last.value("priority") == 5


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"dimensions": 5}, "dimensions", "dimensions is 5; it must be at most 4, the size of this model's embeddings"),
        ({"input": []}, "input", "input is []; it must have at least 1 item"),
        ({"input": ["a"] * 2049}, "input", "input is '2049 inputs'; it must be at most 2048"),
        ({"input": ["a", ""]}, "input[1]", "input[1] is ''; it must have at least 1 character"),
        ({"input": [1] * 2048}, "input", "input is 2048 tokens; it must be at most 2047 tokens"),
        ({"truncate_prompt_tokens": 2048}, "truncate_prompt_tokens", "it must be -1, or 1 … 2047"),
    ],
)
def test_a_bad_field_is_refused(served: Endpoint, triton: FakeTriton, fields: Json, param: str, message: str) -> None:
    check_refusal(_embed(served, **fields), param, message)
    assert triton.requests == []


def test_a_model_without_pooling_is_refused_with_the_setting(triton: FakeTriton) -> None:
    triton.models["generator"] = changed(tasks=["generate"])
    with endpoint(triton.port, triton_model="generator") as served:
        refusal = _embed(served)
        check_refusal(refusal, "model", "LLAMA_POOLING")
        assert error_of(refusal)["code"] == "unsupported_endpoint"
        assert served.http.get(f"/v1/models/{MODEL}").json()["tasks"] == ["generate"]


def test_an_error_of_the_model_names_the_field(served: Endpoint, triton: FakeTriton) -> None:
    triton.failing = "INVALID_ARG: input_ids is 9999; it must be below 3072"
    check_refusal(_embed(served, input=[9999]), "input", "input is 9999; it must be below 3072")


def test_truncation_keeps_the_first_tokens(served: Endpoint, triton: FakeTriton) -> None:
    assert _embed(served, input="What is a list?", truncate_prompt_tokens=3).status_code == 200
    assert triton.last.inputs["input_ids"] == served.tokens("What is a list?")[:3]
    assert _embed(served, input=[1, 5, 6, 7, 8], truncate_prompt_tokens=3).status_code == 200
    assert triton.last.inputs["input_ids"] == [1, 5, 6]


def test_truncation_keeps_the_end_token_that_the_tokenizer_adds(triton: FakeTriton) -> None:
    tokenizer = Tokenizer.from_str(str(description_of()["tokenizer"]))
    ends = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    triton.models["ending"] = changed(tokenizer=tokenizer.to_str())
    with endpoint(triton.port, triton_model="ending") as served:
        tokens = served.tokens("What is a list?")
        assert _embed(served, input="What is a list?", truncate_prompt_tokens=4).status_code == 200
    assert triton.last.inputs["input_ids"] == [*tokens[:3], tokens[-1]]


def test_a_long_list_runs_32_at_a_time(served: Endpoint, triton: FakeTriton) -> None:
    triton.hold_after = 0
    connection = served.begin_request("/v1/embeddings", input=["a"] * 40)
    triton.wait_for(lambda fake: fake.running == 32)
    triton.hold_after = None
    with connection:
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
    assert len(triton.requests) == 40


def test_inputs_of_a_lost_triton_are_sent_again(own: FakeTriton) -> None:
    own.hold_after, own.die_after, own.restart = 0, 0, unchanged
    with endpoint(own.port, resume_timeout=20) as served, ThreadPoolExecutor() as pool:
        answer = pool.submit(_embed, served, input=["a", "a b"])
        # gRPC's server cancels a call that arrives while it ends; a Triton that is lost doesn't.
        own.wait_for(lambda fake: fake.running == 2)
        own.hold_after = None
        assert np.allclose(_vectors(answer.result()), [embedding_of(1), embedding_of(2)])
