"""/openapi.json: a valid document of the paths and of what their bodies may be."""

from __future__ import annotations

from pathlib import Path

import pytest
import schemathesis
from frontend.endpoints import Endpoint, Json, endpoint, error_of
from frontend.fake_triton import FakeTriton
from jsonschema import Draft202012Validator

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT: Json = {"model": "pydoc-llama", "messages": MESSAGES}
GOOD: list[tuple[str, Json]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required", "stop": ["a"], "top_logprobs": 0}),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}),
    ("/v1/completions", {"model": "pydoc-llama", "prompt": [[1], [2]], "logit_bias": {"5": 1}, "suffix": None}),
    ("/v1/responses", {"model": "pydoc-llama", "input": [{"role": "user", "content": "a"}]}),
    (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 4, "stop_sequences": [], "thinking": {"type": "disabled"}},
    ),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/v1/completions/render", {"prompt": ["a", "b"]}),
    ("/tokenize", {"messages": MESSAGES}),
]
BAD: list[tuple[str, Json]] = [
    ("/v1/chat/completions", {**CHAT, "temperature": 3}),
    ("/v1/chat/completions", {**CHAT, "temprature": 1}),
    ("/v1/completions", {"model": "pydoc-llama", "prompt": [[1], []]}),
    ("/v1/responses", {"model": "pydoc-llama", "input": "a", "previous_response_id": "resp_1"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 4}),
]


def _document(served: Endpoint) -> Json:
    response = served.http.get("/openapi.json")
    assert response.status_code == 200
    document = response.json()
    assert isinstance(document, dict)
    return document


def test_the_document_is_valid(served: Endpoint) -> None:
    document = _document(served)
    assert document["openapi"] == "3.1.0"
    schemathesis.openapi.from_dict(document).validate()
    for schema in document["components"]["schemas"].values():  # type: ignore[index]  # JSON
        Draft202012Validator.check_schema(schema)


def test_every_path_with_a_body_has_its_schema(served: Endpoint) -> None:
    paths = _document(served)["paths"]
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
def test_the_document_takes_the_bodies_that_the_endpoint_takes(
    served: Endpoint, path: str, body: Json, good: bool
) -> None:
    _check(served, path, body, good=good)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("post", "/v1/completions", {"prompt": "a", "stream": True}), ("get", "/metrics", None)],
)
def test_the_document_has_an_answers_content_type(served: Endpoint, method: str, path: str, body: Json | None) -> None:
    response = served.http.request(method, path, json=body)
    operation = _document(served)["paths"][path][method]  # type: ignore[index]  # JSON
    assert response.headers["content-type"].split(";")[0] in operation["responses"]["200"]["content"]


def test_the_document_takes_unknown_fields_where_the_endpoint_does(triton: FakeTriton) -> None:
    with endpoint(triton.port, unknown_fields="ignore") as served:
        _check(served, "/v1/chat/completions", {**CHAT, "messages": [{**MESSAGES[0], "a": 1}], "b": 1}, good=True)
        _check(served, "/v1/chat/completions", {**CHAT, "functions": [], "b": 1}, good=False)


def test_a_fields_mark_says_that_it_is_ignored(served: Endpoint) -> None:
    fields = _document(served)["components"]["schemas"]["ChatRequest"]["properties"]  # type: ignore[index]  # JSON
    assert fields["metadata"]["x-ignored"] is True
    assert "x-ignored" not in fields["temperature"]


def test_with_keys_the_document_needs_one(triton: FakeTriton, keys: Path) -> None:
    with endpoint(triton.port, api_keys_file=keys) as served:
        refused = served.http.get("/openapi.json")
        assert (refused.status_code, error_of(refused)["code"]) == (401, "invalid_api_key")
        allowed = served.http.get("/openapi.json", headers={"authorization": "Bearer sk-first"})
        assert "/v1/chat/completions" in allowed.json()["paths"]


def test_the_document_can_be_switched_off(triton: FakeTriton) -> None:
    with endpoint(triton.port, openapi="off") as served:
        assert error_of(served.http.get("/openapi.json"))["code"] == "unknown_url"


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/docs/oauth2-redirect"])
def test_no_page_loads_scripts_from_elsewhere(served: Endpoint, path: str) -> None:
    assert served.http.get(path).status_code == 404
