"""Streams over HTTP from servers that split, cut, babble or never end: real sockets, both clients."""

from __future__ import annotations

import socket
import threading

import pytest
from triton_llama import (
    Completion,
    LlamaConnectionError,
    LlamaTimeoutError,
    OverloadedError,
    RejectedInputError,
    ServerError,
    TritonLlamaError,
)
from triton_llama.sse import LARGEST_EVENT
from unit.peers import answer_with, receive_request, send_chunk, send_head, server
from unit.streaming import Stream, both_clients, event

LAST = event(" é", "length", prompt_tokens=3, tokens=2)


@both_clients
def test_pieces_come_as_they_were_sent_and_add_up_to_a_completion(stream: Stream) -> None:
    with server(answer_with(event("a\n"), event(" b🙂"), LAST)) as port:
        streamed = stream(port, "http")
    assert streamed.texts == ["a\n", " b🙂", " é"]
    assert [str(piece) for piece in streamed.pieces] == streamed.texts
    assert isinstance(streamed.outcome, Completion)
    assert streamed.outcome.text == "a\n b🙂 é"
    assert streamed.outcome.finish_reason == "length"
    assert (streamed.outcome.num_input_tokens, streamed.outcome.num_output_tokens) == (3, 4)


@both_clients
def test_a_piece_is_handed_out_before_the_next_one_is_sent(stream: Stream) -> None:
    has_come = threading.Semaphore(0)

    def wait_for_the_reader(connection: socket.socket) -> None:
        receive_request(connection)
        send_head(connection)
        for chunk in (event("a"), event("b"), LAST):
            send_chunk(connection, chunk)
            assert has_come.acquire(timeout=20)
        send_chunk(connection, b"")

    with server(wait_for_the_reader) as port:
        streamed = stream(port, "http", on_piece=lambda piece: has_come.release())
    assert streamed.texts == ["a", "b", " é"]


@both_clients
def test_borders_inside_characters_lines_and_line_ends_are_not_seen(stream: Stream) -> None:
    whole = (b": hello\n" + event("é🙂") + LAST).replace(b"\n", b"\r\n")
    with server(answer_with(*[whole[index : index + 1] for index in range(len(whole))])) as port:
        assert stream(port, "http").texts == ["é🙂", " é"]


@both_clients
def test_one_event_over_several_lines_is_one_piece(stream: Stream) -> None:
    lines = LAST.replace(b", ", b",\ndata: ")
    assert lines.count(b"data: ") > 3
    with server(answer_with(lines)) as port:
        assert stream(port, "http").texts == [" é"]


@pytest.mark.parametrize("cut", [b"", b"5\r\nda", b"10", b"4\r\ndata\r\n"])
@both_clients
def test_a_server_that_dies_in_mid_stream_is_a_connection_error(stream: Stream, cut: bytes) -> None:
    def die(connection: socket.socket) -> None:
        receive_request(connection)
        send_head(connection)
        send_chunk(connection, event("a"))
        connection.sendall(cut)
        connection.shutdown(socket.SHUT_RDWR)

    with server(die) as port:
        streamed = stream(port, "http")
    assert streamed.texts == ["a"]
    assert isinstance(streamed.outcome, LlamaConnectionError)


@both_clients
def test_a_stream_that_ends_without_a_finish_reason_is_not_taken_for_whole(stream: Stream) -> None:
    with server(answer_with(event("a"), event("b"))) as port:
        streamed = stream(port, "http")
    assert streamed.texts == ["a", "b"]
    assert isinstance(streamed.outcome, ServerError)
    assert str(streamed.outcome) == "the stream ended after 2 pieces without a finish_reason"


@pytest.mark.parametrize(
    "garbage",
    [
        b"data: nonsense\n\n",
        b"data: \xff\n\n",
        b"data: []\n\n",
        b"data: {}\n\n",
        b"data: " + b"[" * 100_000 + b"\n\n",
        event("x").rstrip() + b"\n" + event("y"),
        event("x").rstrip() + event("y").removeprefix(b"data: "),
        event("x").replace(b'"x"', b"7"),
        event("x").replace(b'"x"', b'"\\ud83d"'),
        event("x").replace(b": 1", b": true"),
        event("x").replace(b": 1", b": 1.5"),
        event("x").replace(b'"finish_reason": ""', b'"finish_reason": null'),
        LAST + event("x"),
        b"data: " + b"x" * (LARGEST_EVENT + 1),
    ],
    ids=lambda garbage: repr(garbage[:40]),
)
@both_clients
def test_garbage_is_a_server_error_after_the_pieces_before_it(stream: Stream, garbage: bytes) -> None:
    with server(answer_with(event("a"), garbage)) as port:
        streamed = stream(port, "http")
    assert streamed.texts[0] == "a"
    assert type(streamed.outcome) is ServerError
    assert len(str(streamed.outcome)) < 300


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        ("400 Bad Request", "top_p is 2, must lie in (0, 1]", RejectedInputError),
        ("400 Bad Request", "Exceeds maximum queue size", OverloadedError),
        ("400 Bad Request", "Request timeout expired", OverloadedError),
        ("400 Bad Request", "decoding failed; the server's log has the reason", ServerError),
        ("400 Bad Request", "Stub process 'llama_0_0' is not healthy.", ServerError),
        ("503 Service Unavailable", "Exceeds maximum queue size", OverloadedError),
        ("500 Internal Server Error", "failed to parse the request JSON buffer", ServerError),
    ],
)
@both_clients
def test_a_refusal_is_the_error_it_would_be_elsewhere(
    stream: Stream, status: str, message: str, kind: type[TritonLlamaError]
) -> None:
    body = f'{{"error":"{message}"}}'.encode()
    # Triton sends those of its own as JSON, and those of the model as an event.
    for content_type, answer in (("application/json", body), ("text/event-stream", b"data: " + body + b"\n\n")):
        with server(answer_with(answer, status=status, content_type=content_type)) as port:
            streamed = stream(port, "http")
        assert type(streamed.outcome) is kind
        assert str(streamed.outcome) == message


@pytest.mark.parametrize(
    ("message", "kind"),
    [("decoding failed; the server's log has the reason", ServerError), ("the server is stopping", OverloadedError)],
)
@both_clients
def test_an_error_in_mid_stream_comes_after_the_pieces(
    stream: Stream, message: str, kind: type[TritonLlamaError]
) -> None:
    with server(answer_with(event("a"), f'data: {{"error":"{message}"}}\n\n'.encode())) as port:
        streamed = stream(port, "http")
    assert streamed.texts == ["a"]
    assert type(streamed.outcome) is kind
    assert str(streamed.outcome) == message


@both_clients
def test_an_answer_that_is_no_stream_is_a_server_error(stream: Stream) -> None:
    with server(answer_with(b"<html>", content_type="text/html")) as port:
        outcome = stream(port, "http").outcome
    assert type(outcome) is ServerError
    assert "text/html" in str(outcome)


@both_clients
def test_an_error_page_without_end_is_cut_off(stream: Stream) -> None:
    def babble(connection: socket.socket) -> None:
        receive_request(connection)
        send_head(connection, "502 Bad Gateway", "text/html")
        while True:
            send_chunk(connection, b"x" * 4096)

    with server(babble) as port:
        outcome = stream(port, "http").outcome
    assert type(outcome) is ServerError
    assert "HTTP status 502" in str(outcome)


@both_clients
def test_a_stream_that_never_ends_does_not_outlast_the_timeout(stream: Stream) -> None:
    def go_on(connection: socket.socket) -> None:
        receive_request(connection)
        send_head(connection)
        while True:
            send_chunk(connection, event("a"))

    with server(go_on) as port:
        streamed = stream(port, "http", timeout=0.5)
    assert isinstance(streamed.outcome, LlamaTimeoutError)
    assert "within 0.5 s" in str(streamed.outcome)
    assert streamed.pieces
