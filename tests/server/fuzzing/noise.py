"""Hypothesis strategies for bytes that are no request at all, for both ports."""

from __future__ import annotations

import struct

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from server.fuzzing.sending import GrpcBytes, HttpBytes

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_TLS = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20
_BEGINNINGS = (
    *(b"", b"\r\n" * 30, b"GET", b"GET / HTTP/9.9\r\n\r\n", b"GET /v2 HTTP/1.1\r\n", b"\x00" * 100, _TLS, _PREFACE),
    *(b"POST  \r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"),
    b"POST /v2/models/llama/generate HTTP/1.1\r\n" + b"a: b\r\n" * 200,
)


_payloads = st.binary(max_size=60)
_types = st.integers(0, 12)
_flags = st.sampled_from([0, 1, 4, 5, 8, 32, 255])
_streams = st.sampled_from([0, 1, 2, 3, 2**31 - 1, 2**32 - 1])
_lengths = st.sampled_from([None, None, None, 0, 1, 9, 16384, 2**24 - 1])


@st.composite
def _frames(draw: st.DrawFn) -> bytes:
    """Return a frame of HTTP/2, of any type, on any stream; its length isn't always its payload's."""
    payload, length = draw(_payloads), draw(_lengths)
    size = struct.pack(">I", len(payload) if length is None else length)[1:]
    return size + bytes([draw(_types), draw(_flags)]) + struct.pack(">I", draw(_streams)) + payload


http_noise: SearchStrategy[HttpBytes] = st.builds(
    lambda beginning, rest: HttpBytes(beginning + rest, whole=False),
    st.sampled_from(_BEGINNINGS),
    st.binary(max_size=300),
)
grpc_noise: SearchStrategy[GrpcBytes] = st.one_of(
    st.builds(lambda frames: GrpcBytes(_PREFACE + b"".join(frames)), st.lists(_frames(), max_size=4)),
    st.builds(
        lambda beginning, rest: GrpcBytes(beginning + rest), st.sampled_from(_BEGINNINGS), st.binary(max_size=300)
    ),
)
