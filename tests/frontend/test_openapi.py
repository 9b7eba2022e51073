"""/openapi.json: a valid document of the paths and of what their bodies may be."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from frontend.endpoints import Endpoint, Json, endpoint
from frontend.fake_triton import FakeTriton
from jsonschema import Draft202012Validator

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT: Json = {"model": "pydoc-llama", "messages": MESSAGES}
GOOD: list[tuple[str, Json]] = [
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required", "stop": ["a"], "top_logprobs": 0}),
    ("/v1/completions", {"model": "pydoc-llama", "prompt": [[1], [2]], "logit_bias": {"5": 1}, "suffix": None}),
    ("/v1/responses", {"model": "pydoc-llama", "input": [{"role": "user", "content": "a"}]}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4, "thinking": {"type": "disabled"}}),
    ("/tokenize", {"messages": MESSAGES}),
]
BAD: list[tuple[str, Json]] = [
    ("/v1/chat/completions", {**CHAT, "temprature": 1}),
    ("/v1/completions", {"model": "pydoc-llama", "prompt": [[1], []]}),
    ("/v1/responses", {"model": "pydoc-llama", "input": "a", "previous_response_id": "resp_1"}),
]


def _document(served: Endpoint) -> Json:
    response = served.http.get("/openapi.json")
    assert response.status_code == 200
    document = response.json()
    assert isinstance(document, dict)
    return document


def test_the_document_is_valid_and_has_a_schema_of_every_body(served: Endpoint) -> None:
    document = _document(served)
    assert document["openapi"] == "3.1.0"
    schemathesis.openapi.from_dict(document).validate()
    for schema in document["components"]["schemas"].values():  # type: ignore[index]  # JSON
        Draft202012Validator.check_schema(schema)
    paths = document["paths"]
    assert isinstance(paths, dict)
    without = [path for path, methods in paths.items() if "post" in methods and "requestBody" not in methods["post"]]
    assert without == ["/v1/responses/{name}/cancel"]


def _check(served: Endpoint, path: str, body: Json, *, good: bool) -> None:
    """Assert that the document and the endpoint take a body, or that neither does."""
    document = _document(served)
    operation = document["paths"][path]["post"]  # type: ignore[index]  # JSON
    reference = operation["requestBody"]["content"]["application/json"]["schema"]
    assert Draft202012Validator({**document, **reference}).is_valid(body) is good
    assert served.http.post(path, json=body).status_code == (200 if good else 400)


@pytest.mark.parametrize(("path", "body", "good"), [*((*row, True) for row in GOOD), *((*row, False) for row in BAD)])
def test_the_document_takes_what_the_endpoint_takes(served: Endpoint, path: str, body: Json, good: bool) -> None:
    _check(served, path, body, good=good)


def test_the_document_takes_unknown_fields_where_the_endpoint_does(triton: FakeTriton) -> None:
    with endpoint(triton.port, unknown_fields="ignore") as served:
        _check(served, "/v1/chat/completions", {**CHAT, "messages": [{**MESSAGES[0], "a": 1}], "b": 1}, good=True)
        _check(served, "/v1/chat/completions", {**CHAT, "functions": [], "b": 1}, good=False)


def test_the_document_marks_ignored_fields(served: Endpoint) -> None:
    document: dict[str, Any] = _document(served)
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["user"]["x-ignored"] is True
    assert "x-ignored" not in fields["stop"]


def test_no_page_loads_scripts_from_elsewhere(served: Endpoint) -> None:
    assert [served.http.get(path).status_code for path in ("/docs", "/redoc")] == [404, 404]
