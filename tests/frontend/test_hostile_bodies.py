"""Hostile bodies are refused with the field's name, and the endpoint goes on answering.

Hypothesis puts any value into any field. The draws are the same in each run.
"""

from __future__ import annotations

import json
import re

import httpx
from frontend.client_types import read_error
from frontend.endpoints import Endpoint, Json, error_of
from frontend.fake_triton import FakeTriton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from triton_llama_openai.protocol.chat import ChatRequest
from triton_llama_openai.protocol.completions import CompletionRequest
from triton_llama_openai.protocol.embeddings import EmbeddingRequest
from triton_llama_openai.protocol.messages import CountTokensRequest, MessagesRequest
from triton_llama_openai.protocol.responses import ResponsesRequest
from triton_llama_openai.protocol.tokenization import DetokenizeRequest, TokenizeRequest

DRAWN = settings(
    max_examples=120, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
MODEL = {"model": "pydoc-llama"}
SCHEMAS: dict[str, tuple[type[BaseModel], Json]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
    "/v1/completions": (CompletionRequest, {"prompt": "a", "max_tokens": 4}),
    "/v1/responses": (ResponsesRequest, {"input": [{"role": "user", "content": "a"}], "max_output_tokens": 4}),
    "/v1/messages": (MessagesRequest, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "a"}),
    "/tokenize": (TokenizeRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}
FIELDS = [
    (path, field.alias or name) for path, (schema, _) in SCHEMAS.items() for name, field in schema.model_fields.items()
]
NUMBERS = [0, -1, 1, 2**31 - 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.5, 1e308, 1e-320]
TEXTS = ["", "0", "true", "auto", "ä" * 600, "a" * 5000, "\x00", "\u2028", "🙂" * 300, "(", "[", '"']
LISTS = [[], [[]], [0], [-1], ["a"] * 20, [""], [None], [1.5], ["\x00"], [0] * 70_000, [{}]]
OBJECTS = [{}, {"": 0}, {"a": 1}, {"type": "text"}, {"0": 101}, {"type": []}, {"role": "user"}, {"$ref": "#"}]
VALUES = st.sampled_from([True, False, *NUMBERS, *TEXTS, *LISTS, *OBJECTS]) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
GOOD = json.dumps({**MODEL, "messages": [{"role": "user", "content": "Grüße 🙂"}]}, ensure_ascii=False).encode()
PLACES = st.integers(0, len(GOOD) - 1)
BROKEN = st.one_of(
    PLACES.map(lambda end: GOOD[:end]),
    st.tuples(PLACES, st.binary(min_size=1, max_size=3)).map(lambda cut: GOOD[: cut[0]] + cut[1] + GOOD[cut[0] :]),
    st.sampled_from([b"", b"NaN", b"[]", GOOD.decode().encode("utf-16"), b"[" * 100_000, b'{"a":' * 100_000]),
)


def _with_value(field: tuple[str, str], value: object) -> tuple[str, bytes, set[str]]:
    """Return a path, a good body but for a value, and the names of which a refusal has one."""
    path, name = field
    body = json.dumps({**MODEL, **SCHEMAS[path][1], name: value}).encode()
    return path, body, {name, "prompt"} if name == "messages" else {name}


BAD_VALUES = st.builds(_with_value, st.sampled_from(FIELDS), VALUES)
BROKEN_BODIES = st.tuples(st.sampled_from(sorted(SCHEMAS)), BROKEN).map(
    lambda drawn: (*drawn, {*SCHEMAS[drawn[0]][0].model_fields})
)


def _check(status: int, error: Json | None, fields: set[str]) -> None:
    """Assert that a response is an answer, or a refusal that names one of the fields or the whole body."""
    assert status in (200, 400, 404), error
    if error is None or error.get("code") in ("invalid_json", "context_length_exceeded"):
        return
    message = str(error["message"])
    # Anthropic's form has no param: the message begins with it.
    param = error["param"] if "param" in error else re.split("[ ,]", message)[0]
    if param in (None, "the"):
        assert message.startswith("the body ")
    else:
        assert str(param).split("[")[0].split(".")[0] in fields, error


def _refusal(response: httpx.Response) -> Json | None:
    if response.status_code == 200:
        return None
    is_message = response.url.path.startswith("/v1/messages")
    return read_error(response).error.model_dump() if is_message else error_of(response)


def test_a_bad_value_or_a_broken_body_is_refused_by_its_fields_name(served: Endpoint, triton: FakeTriton) -> None:
    @DRAWN
    @given(body=BAD_VALUES | BROKEN_BODIES)
    def send(body: tuple[str, bytes, set[str]]) -> None:
        path, content, names = body
        response = served.http.post(path, content=content, timeout=20)
        _check(response.status_code, _refusal(response), names)

    send()
    assert served.chat().json()["choices"][0]["message"]["content"] == " Hello, world."
