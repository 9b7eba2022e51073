"""Clients that send rubbish, hang up or come in crowds: the server goes on answering, and everyone gets their own."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from functools import partial

import pytest
from server.crowd import FULL_SET, at_once, everywhere
from server.wires import WIRES, Answer, Refusal, ask, generate_url, grpc, infer_url, post
from triton_local.server import LocalTriton

INSIDES = ("Traceback", ".py", "site-packages", 'File "')


AFTERWARDS = {**FULL_SET, "text_input": "After the storm", "temperature": 1.0, "seed": 99}


@pytest.fixture(scope="module")
def before(triton: LocalTriton) -> Answer:
    return ask(triton, **AFTERWARDS)


@pytest.fixture(autouse=True)
def _still_well(triton: LocalTriton, before: Answer) -> Iterator[None]:
    """After each of these, answers are what they were before all of them."""
    yield
    assert everywhere(triton, **AFTERWARDS) == before


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"{}",
        b'"text_input"',
        b"\xff\xfe\x00",
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
        b"[" * 100_000,
    ],
    ids=lambda body: body[:24].decode(errors="backslashreplace"),
)
def test_rubbish_is_refused_with_an_error_in_json(triton: LocalTriton, body: bytes) -> None:
    for url in (generate_url(triton), infer_url(triton)):
        status, answer = post(url, body)
        # Triton's own JSON parser says 500 to some of what is the client's fault.
        assert status in (400, 500), answer
        error = json.loads(answer)["error"]
        assert not [inside for inside in INSIDES if inside in error], error


def test_a_prompt_of_a_megabyte_is_refused(triton: LocalTriton) -> None:
    status, answer = post(generate_url(triton), json.dumps({"text_input": "x " * 500_000}).encode())
    assert status == 400
    assert "text_input is a text of 1000000 bytes" in json.loads(answer)["error"]


@pytest.mark.parametrize("name", ["stop_words", "bad_words"])
def test_a_word_of_a_megabyte_is_refused(triton: LocalTriton, name: str) -> None:
    refusal = grpc(triton, {**FULL_SET, "text_input": "Return", name: ["e" * 1_000_000]})
    assert isinstance(refusal, Refusal)
    assert f"{name} is a list with a word of 1000000 bytes" in refusal.message


@pytest.mark.parametrize(("name", "most"), [("stop_words", 16), ("bad_words", 64)])
def test_the_words_that_are_hardest_to_follow_change_nothing(triton: LocalTriton, name: str, most: int) -> None:
    request = {**FULL_SET, "text_input": "eeee", "seed": 4, "temperature": 1.0}
    hardest = ["e" * (1024 - index) for index in range(most)]
    assert ask(triton, **request | {name: hardest}) == ask(triton, **request)


def test_half_a_request_and_a_client_that_hangs_up_harm_nobody(triton: LocalTriton) -> None:
    host, port = triton.http_url.split(":")
    body = json.dumps({"text_input": "Nobody listens", "max_tokens": 60, "min_tokens": 60}).encode()
    head = b"POST /v2/models/llama/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    pieces = [
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
    sockets = [socket.create_connection((host, int(port)), timeout=30) for _ in pieces]
    for connection, piece in zip(sockets, pieces, strict=True):
        connection.sendall(piece)
    # With all of them still open.
    assert ask(triton, text_input="Meanwhile", max_tokens=3, min_tokens=3).num_output_tokens == 3
    for connection in sockets:
        connection.close()


def test_a_crowd_of_sixty_four_gets_sixty_four_texts_of_their_own(triton: LocalTriton) -> None:
    requests = [
        {
            **FULL_SET,
            "text_input": f"Client number {index} says",
            "max_tokens": 2 + index % 5,
            "min_tokens": 2 + index % 5,
            "temperature": 1.0,
            "seed": index,
            "exclude_input_in_output": False,
        }
        for index in range(64)
    ]
    answers = at_once([partial(ask, triton, WIRES[index % 4], **request) for index, request in enumerate(requests)])
    for index, answer in enumerate(answers):
        assert answer.text.startswith(f"Client number {index} says")
        assert answer.num_output_tokens == 2 + index % 5
    again = at_once([partial(ask, triton, **request) for request in requests])
    assert again == answers
