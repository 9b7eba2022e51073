"""Malformed bodies, incomplete requests and clients that hang up: refused or ignored, and the server goes on."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from server.batches import FULL_SET
from server.clients import Answer, ask, everywhere, generate_url, infer_url, post
from triton_local.server import LocalTriton

BODIES = [
    b"", b"{", b"null", b"[]", b"{}", b'"text_input"', b"\xff\xfe\x00", b"[" * 100_000,
    b'{"text_input": "\\ud800"}',
    b'{"text_input": null}',
    b'{"text_input": 7}',
    b'{"text_input": {"text_input": "x"}}',
    b'{"text_input": "x", "max_tokens": [1, 2]}',
    b'{"text_input": "x", "max_tokens": "7"}',
    b'{"text_input": "x", "max_tokens": 1.5}',
    b'{"text_input": "x", "temperature": 1e999}',
    b'{"text_input": "x", "seed": -1}',
    b'{"text_input": "x", "stream": "false"}',
    b'{"text_input": "x", "text_input": "y"}',
    b'{"inputs": [{"name": "text_input"}]}',
    b'{"inputs": [{"name": "text_input", "shape": [-1, 1], "datatype": "BYTES", "data": ["x"]}]}',
    b'{"inputs": [{"name": "text_input", "shape": [4000000000, 1], "datatype": "BYTES", "data": ["x"]}]}',
    b'{"inputs": [{"name": "text_input", "shape": [0, 1], "datatype": "BYTES", "data": []}]}',
]  # fmt: skip

AFTERWARDS = {**FULL_SET, "text_input": "After the storm", "temperature": 1.0, "seed": 99}


@pytest.fixture(scope="module")
def before(triton: LocalTriton) -> Answer:
    return ask(triton, **AFTERWARDS)


@pytest.fixture(autouse=True)
def _still_answers(triton: LocalTriton, before: Answer) -> Iterator[None]:
    """After each test the server answers as it did before all of them."""
    yield
    assert everywhere(triton, **AFTERWARDS) == before


@pytest.mark.parametrize("megabytes", [5, 10])
def test_a_body_of_megabytes_without_a_json_content_type_is_refused(triton: LocalTriton, megabytes: int) -> None:
    """With the default stack this is signal 11 in tritonserver from 4.2 MB on; `curl -d` sends this type."""
    body = json.dumps({"text_input": "x " * (megabytes * 500_000)}).encode()
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    asked = urllib.request.Request(generate_url(triton), data=body, headers=headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked, timeout=120)
    with refused.value as error:
        assert error.code == 400
        assert f"text_input is a text of {megabytes}000000 bytes" in json.load(error)["error"]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body[:24].decode(errors="backslashreplace"))
def test_a_malformed_body_is_refused_with_an_error_in_json(triton: LocalTriton, body: bytes) -> None:
    for url in (generate_url(triton), infer_url(triton)):
        status, answer = post(url, body)
        # Triton's own JSON parser answers 500 to some of the client's faults.
        assert status in (400, 500), answer
        error = json.loads(answer)["error"]
        assert not [inside for inside in ("Traceback", ".py", "site-packages", 'File "') if inside in error], error


def test_incomplete_requests_and_clients_that_hang_up_do_not_block_others(triton: LocalTriton) -> None:
    host, port = triton.http_url.split(":")
    body = json.dumps({"text_input": "Gone", "max_tokens": 60, "min_tokens": 60}).encode()
    head = b"POST /v2/models/llama/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    starts = [
        b"POST /v2/mod",
        head,
        whole[:-10],
        head + b"Content-Length: 99999999999999999999\r\n\r\n{}",
        head + b"Content-Length: -5\r\n\r\n{}",
        head + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        whole,
        whole,
    ]
    sockets = [socket.create_connection((host, int(port)), timeout=30) for _ in starts]
    for connection, start in zip(sockets, starts, strict=True):
        connection.sendall(start)
    # With all of them still open.
    assert ask(triton, text_input="Meanwhile", max_tokens=3, min_tokens=3).num_output_tokens == 3
    for connection in sockets:
        connection.close()
