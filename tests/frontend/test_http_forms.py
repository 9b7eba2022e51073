"""HTTP's forms of one request: targets, methods, encodings of the body, headers of the key."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
from frontend.endpoints import Endpoint, check_refusal, endpoint, error_of
from frontend.fake_triton import FakeTriton

BODY = json.dumps({"model": "pydoc-llama", "prompt": "Return a list"}).encode()
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("target", ["/v1/models/", "/v1/models/pydoc-llama/", "/health/live/", "/metrics/"])
def test_a_trailing_slash_is_as_without(served: Endpoint, target: str) -> None:
    assert served.http.get(target).status_code == 200
    assert served.http.post(f"{COMPLETIONS}/", content=BODY).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/pydoc-llama", "/metrics"])
def test_head_has_the_headers_of_get_and_no_body(served: Endpoint, path: str) -> None:
    response = served.http.head(path)
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-type"] == served.http.get(path).headers["content-type"]
    assert served.http.head(COMPLETIONS).status_code == 405


def test_the_version_is_the_packages(served: Endpoint) -> None:
    assert served.http.get("/version").json() == {"version": version("triton-llama")}


def test_a_target_may_have_scheme_and_host(served: Endpoint) -> None:
    with served.begin(b"GET http://host:80/health/live HTTP/1.1\r\nHost: host\r\n\r\n") as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_byte_order_mark_is_left_out(served: Endpoint) -> None:
    assert served.http.post(COMPLETIONS, content=b"\xef\xbb\xbf" + BODY).status_code == 200


@pytest.mark.parametrize(
    ("encoding", "encode"),
    [("gzip", gzip.compress), ("Deflate", zlib.compress), ("deflate", partial(zlib.compress, wbits=-15))],
)
def test_a_compressed_body_is_read(
    served: Endpoint, triton: FakeTriton, encoding: str, encode: Callable[[bytes], bytes]
) -> None:
    response = served.http.post(COMPLETIONS, content=encode(BODY), headers={"content-encoding": encoding})
    assert response.status_code == 200
    assert triton.last.inputs["text_input"] == ["Return a list"]


def test_a_body_that_unpacks_beyond_the_bound_is_refused(triton: FakeTriton) -> None:
    with endpoint(triton.port, max_body_bytes=20_000) as served:
        bomb = gzip.compress(b" " * 10_000_000)
        assert len(bomb) < 20_000
        response = served.http.post(COMPLETIONS, content=bomb, headers={"content-encoding": "gzip"})
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("body", [b"", BODY, gzip.compress(BODY)[:-1], gzip.compress(BODY) + b"x"])
def test_a_damaged_compressed_body_is_refused(served: Endpoint, body: bytes) -> None:
    response = served.http.post(COMPLETIONS, content=body, headers={"content-encoding": "gzip"})
    check_refusal(response, None, "isn't gzip")


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip"])
def test_another_content_encoding_is_refused(served: Endpoint, encoding: str) -> None:
    response = served.http.post(COMPLETIONS, content=BODY, headers={"content-encoding": encoding})
    assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_encoding")


@pytest.mark.parametrize("header", ["x-api-key", "api-key"])
def test_a_key_may_come_as_anthropics_and_azures_clients_send_it(triton: FakeTriton, keys: Path, header: str) -> None:
    with endpoint(triton.port, api_keys_file=keys) as served:
        assert served.http.get("/v1/models", headers={header: "sk-first"}).status_code == 200
        assert served.http.get("/v1/models", headers={header: "sk-other"}).status_code == 401
