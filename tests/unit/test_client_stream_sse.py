"""Server-sent events, however the bytes were split on their way."""

from __future__ import annotations

import pytest
from triton_llama import ServerError
from triton_llama.sse import LARGEST_EVENT, EventReader


def read(*chunks: bytes) -> list[bytes]:
    reader = EventReader()
    return [data for chunk in chunks for data in reader.feed(chunk)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"data: a\r\n\ndata: b\n\r\n", [b"a", b"b"]),
        (b"data:a\n\ndata:  b\n\n", [b"a", b" b"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data: a\r\ndata: b\r\n\r\n", [b"a\nb"]),
        (b"data\ndata: b\n\n", [b"\nb"]),
        (b": a comment\nevent: piece\nid: 7\nretry: 1\ndata: a\nunknown: b\n\n", [b"a"]),
        (b"\n\n\r\n\r\rdata: a\n\n\n\n", [b"a"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        ("data: é🙂\u2028\x85\x0b\n\n".encode(), ["é🙂\u2028\x85\x0b".encode()]),
        (b"event: a\n\ndata: b\n\n", [b"b"]),
        (b"data: whole\n\ndata: cut off\n", [b"whole"]),
        (b"data: whole\n\ndata: cut o", [b"whole"]),
        (b"", []),
    ],
)
def test_events_are_the_same_wherever_the_chunks_are_split(stream: bytes, events: list[bytes]) -> None:
    assert read(stream) == events
    assert read(*[stream[index : index + 1] for index in range(len(stream))]) == events
    for border in range(len(stream)):
        assert read(stream[:border], b"", stream[border:]) == events


def test_an_event_comes_with_the_byte_that_ends_it_and_not_later() -> None:
    reader = EventReader()
    assert list(reader.feed(b"data: a\r\n")) == []
    assert list(reader.feed(b"\r")) == [b"a"]
    # The other half of that line end is no blank line of its own.
    assert list(reader.feed(b"\ndata: b\n\n")) == [b"b"]


def test_the_event_before_a_fault_is_not_lost() -> None:
    reader = EventReader()
    events = reader.feed(b"data: a\n\ndata: " + b"x" * LARGEST_EVENT)
    assert next(events) == b"a"
    with pytest.raises(ServerError):
        next(events)


@pytest.mark.parametrize("part", [b"x" * 65536, b"data: " + b"x" * 65530 + b"\n", b"data\n" * 13000])
def test_an_event_without_an_end_is_refused_before_it_fills_the_memory(part: bytes) -> None:
    reader = EventReader()
    with pytest.raises(ServerError, match="more than 4194304 bytes"):
        # Four times as much as is allowed, a byte counted for each line.
        any(list(reader.feed(part)) for _ in range(16 * LARGEST_EVENT // len(part)))


def test_the_largest_event_is_read() -> None:
    data = b"x" * (LARGEST_EVENT - 64)
    assert read(b"data: " + data + b"\n\n") == [data]
