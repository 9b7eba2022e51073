"""Bounds of the endpoint: bodies, messages, requests in flight, connections, keys; and a graceful end."""

from __future__ import annotations

import gzip
from contextlib import suppress
from pathlib import Path

import pytest
from frontend.client_types import assistant, user
from frontend.endpoints import WITHOUT_ITS_BODY, Endpoint, Json, check_refusal, endpoint, error_of
from frontend.fake_triton import FakeTriton
from triton_llama_openai.auth import ApiKeys
from triton_llama_openai.middleware import MAX_HEADER_BYTES
from triton_llama_openai.settings import InvalidSettingsError


def test_a_body_beyond_the_bound_is_refused_announced_chunked_or_packed(triton: FakeTriton) -> None:
    bomb = gzip.compress(b" " * 1_000_000)
    assert len(bomb) < 2000
    with endpoint(triton.port, max_body_bytes=2000) as served:
        announced = served.chat(messages=[{"role": "user", "content": "a" * 2000}])
        chunked = served.http.post("/v1/completions", content=iter([b'{"prompt": "', b"a" * 2000, b'"}']))
        packed = served.http.post("/v1/completions", content=bomb, headers={"content-encoding": "gzip"})
        for response in (announced, chunked, packed):
            assert response.status_code == 413
            error = error_of(response)
            assert (error["code"], "at most 2000 bytes" in str(error["message"])) == ("body_too_large", True)
        assert served.chat().status_code == 200


def test_a_body_that_does_not_arrive_is_refused(triton: FakeTriton) -> None:
    with endpoint(triton.port, body_timeout=2) as served:
        with served.begin(WITHOUT_ITS_BODY) as connection:
            assert connection.recv(65536).startswith(b"HTTP/1.1 408")
        assert served.chat().status_code == 200


def test_lists_beyond_their_bound_are_refused(triton: FakeTriton) -> None:
    three: list[Json] = [{"role": "user", "content": "a"}] * 3
    use = assistant({"type": "tool_use", "id": "1", "name": "add", "input": {}})
    result: Json = {"type": "tool_result", "tool_use_id": "1", "content": "a"}
    with endpoint(triton.port, max_messages=2, max_prompts=2) as served:
        check_refusal(served.chat(messages=three), "messages", "at most 2")
        check_refusal(served.complete(prompt=["a"] * 3), "prompt", "at most 2")
        check_refusal(served.post("/tokenize", messages=three), "messages", "at most 2")
        check_refusal(served.respond(input=three), "input", "input is '3 items'; it must")
        check_refusal(served.respond(input=three[:2], instructions="a"), "input", "3 items with instructions")
        assert "'3 messages with system" in served.message(messages=three).text
        derived = served.message(messages=[use, user(result, result)], system="a").text
        assert "'4 messages with system and each tool_result'; it must be at most 2" in derived
        assert served.complete(prompt=["a"] * 2).status_code == 200


def test_tokens_beyond_the_context_never_reach_the_model(served: Endpoint, triton: FakeTriton) -> None:
    for prompt, field in (([1] * 2048, "prompt"), ([[1], [1] * 4000], "prompt[1]")):
        error = error_of(served.complete(prompt=prompt, echo=True))
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")
        assert "maximum context length is 2048 tokens" in str(error["message"])
    assert not triton.requests
    assert served.complete(prompt=[1] * 2047).status_code == 200


def test_log_probabilities_of_prompts_are_bounded_in_total(served: Endpoint, triton: FakeTriton) -> None:
    many = ["a" * 5000] * 128
    for fields in ({"prompt_logprobs": 20}, {"prompt_logprobs": 1, "n": 16}, {"logprobs": 20, "echo": True}):
        check_refusal(served.complete(prompt=many, **fields), next(iter(fields)), "at most 524288")
    assert not triton.requests
    assert served.complete(prompt=many[:4], prompt_logprobs=20).status_code == 200
    assert served.complete(prompt=many, logprobs=1, echo=True).status_code == 200
    assert served.complete(prompt=many, logprobs=20).status_code == 200


def test_a_request_beyond_those_in_flight_is_refused_until_one_ends(triton: FakeTriton) -> None:
    with endpoint(triton.port, max_requests=1) as served:
        triton.hold_after = 1
        with served.begin_request("/v1/completions", prompt="a", stream=True):
            triton.wait_for(lambda fake: fake.running == 1)
            response = served.chat()
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            assert error_of(response)["code"] == "overloaded"
        # Triton's side ends before the endpoint has counted the request as ended.
        triton.wait_for(lambda fake: not fake.running and not _in_flight(served))
        triton.hold_after = None
        assert served.chat().status_code == 200
        # One whose body is still to come is in flight, too.
        with served.begin(WITHOUT_ITS_BODY):
            triton.wait_for(lambda _: _in_flight(served) == 1)
            assert error_of(served.post("/tokenize", prompt="a"))["code"] == "overloaded"
            assert served.http.get("/v1/models").status_code == 200
        triton.wait_for(lambda _: not _in_flight(served))
        assert served.chat().status_code == 200


def _in_flight(served: Endpoint) -> float:
    """Return how many requests run."""
    page = served.http.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in page if line.startswith("llama_openai_requests_in_flight "))


def test_requests_are_refused_while_there_are_too_many_connections(triton: FakeTriton) -> None:
    with endpoint(triton.port, max_connections=2) as served:
        with served.begin(b""), served.begin(b""):
            triton.wait_for(lambda _: served.http.get("/v1/models").status_code == 503)
        triton.wait_for(lambda _: served.http.get("/v1/models").status_code == 200)


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX-Large: ",
        b"GET /",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nTrailer: ",
    ],
    ids=["headers", "address", "trailers"],
)
def test_headers_without_end_are_refused(served: Endpoint, begun: bytes) -> None:
    with served.begin(begun) as connection:
        # It may be closed while this is still sending.
        with suppress(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"a" * 65536)
            pytest.fail("64 MB were taken")
        assert served.http.get("/health/live").status_code == 200


def test_headers_beyond_the_bound_are_refused_by_their_bound(served: Endpoint) -> None:
    response = served.http.get("/v1/models", headers={"x-large": "a" * MAX_HEADER_BYTES})
    assert response.status_code == 431
    assert error_of(response)["code"] == "headers_too_large"
    assert "at most 32768 bytes" in str(error_of(response)["message"])


def test_an_unknown_key_is_refused(keyed: Endpoint) -> None:
    values = ("Bearer sk-third", "Bearer sk-firs", "Bearer", "sk-first", "Basic sk-first")
    requests = [("GET", "/v1/models", {"authorization": value}) for value in values]
    paths = ("/v1/chat/completions", "/v1/completions/render", "/tokenize")
    requests += [("POST", path, {}) for path in (*paths, "/v1/load_lora_adapter", "/v1/unload_lora_adapter")]
    requests += [("GET", path, {}) for path in ("/openapi.json", "/page/serving")]
    for method, path, headers in requests:
        response = keyed.http.request(method, path, headers=headers)
        assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")


def test_a_request_with_a_known_key_is_answered(keyed: Endpoint) -> None:
    for key in ("sk-first", "schlüssel"):
        headers = {b"authorization": f"Bearer {key}".encode()}
        assert keyed.http.get("/v1/models", headers=headers).status_code == 200


def test_health_and_the_page_need_no_key(keyed: Endpoint) -> None:
    for path in ("/", "/health", "/health/live", "/ping", "/version", "/metrics"):
        assert keyed.http.get(path).status_code == 200


def test_a_browser_page_may_call_only_from_an_allowed_origin(served: Endpoint, triton: FakeTriton) -> None:
    origin = {"origin": "https://chat.example"}
    preflight = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert "access-control-allow-origin" not in served.http.get("/v1/models", headers=origin).headers
    with endpoint(triton.port, allowed_origins="https://chat.example, https://other.example") as open_to:
        allowed = open_to.http.options("/v1/chat/completions", headers=preflight)
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
        headers = open_to.http.get("/v1/models", headers=origin).headers
        assert headers["access-control-allow-origin"] == "https://chat.example"
        exposed = headers["access-control-expose-headers"].split(", ")
        assert exposed == ["x-request-id", "request-id", "x-ignored-parameters", "retry-after"]
        elsewhere = open_to.http.get("/v1/models", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in elsewhere.headers


def test_a_file_without_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# nothing\n\n")
    with pytest.raises(InvalidSettingsError, match="has no key"):
        ApiKeys.read(tmp_path / "keys")
