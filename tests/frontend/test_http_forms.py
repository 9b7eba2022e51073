"""HTTP's forms of one request: targets, methods, encodings of the body, headers of the key."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest
from frontend.endpoints import Endpoint, check_refusal, error_of
from frontend.fake_triton import FakeTriton

BODY = json.dumps({"model": "pydoc-llama", "prompt": "Return a list"}).encode()
COMPLETIONS = "/v1/completions"


def test_a_target_may_have_a_trailing_slash_or_scheme_and_host(served: Endpoint) -> None:
    assert served.http.get("/v1/models/pydoc-llama/").status_code == 200
    assert served.http.post(f"{COMPLETIONS}/", content=BODY).status_code == 200
    with served.begin(b"GET http://host:80/health/live HTTP/1.1\r\nHost: host\r\n\r\n") as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_head_has_the_headers_of_get_and_no_body(served: Endpoint) -> None:
    response = served.http.head("/metrics")
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-type"] == served.http.get("/metrics").headers["content-type"]
    assert served.http.head(COMPLETIONS).status_code == 405


@pytest.mark.parametrize(
    ("encoding", "body"),
    # The byte order mark is left out.
    [
        ("gzip", gzip.compress(b"\xef\xbb\xbf" + BODY)),
        ("Deflate", zlib.compress(BODY)),
        ("deflate", zlib.compress(BODY, wbits=-15)),
    ],
)
def test_a_compressed_body_is_read(served: Endpoint, triton: FakeTriton, encoding: str, body: bytes) -> None:
    response = served.http.post(COMPLETIONS, content=body, headers={"content-encoding": encoding})
    assert response.status_code == 200
    assert triton.prompt == "Return a list"


@pytest.mark.parametrize("body", [BODY, gzip.compress(BODY)[:-1], gzip.compress(BODY) + b"x"])
def test_a_damaged_compressed_body_is_refused(served: Endpoint, body: bytes) -> None:
    response = served.http.post(COMPLETIONS, content=body, headers={"content-encoding": "gzip"})
    check_refusal(response, None, "isn't gzip")


def test_another_content_encoding_is_refused(served: Endpoint) -> None:
    response = served.http.post(COMPLETIONS, content=BODY, headers={"content-encoding": "gzip, gzip"})
    assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_encoding")


@pytest.mark.parametrize("header", ["x-api-key", "api-key"])
def test_a_key_may_come_as_anthropics_and_azures_clients_send_it(keyed: Endpoint, header: str) -> None:
    assert keyed.http.get("/v1/models", headers={header: "sk-first"}).status_code == 200
    assert keyed.http.get("/v1/models", headers={header: "sk-other"}).status_code == 401
