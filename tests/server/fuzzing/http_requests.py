"""Hypothesis strategies for what a client sends to the HTTP port as a request: address, headers, framing and body.

One part is wrong at a time, mostly, so that the others are looked at as well.
"""

from __future__ import annotations

import gzip
import zlib

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from server.fuzzing.sending import HttpBytes
from server.fuzzing.tensors import InferBody, infer_bodies, to_json
from server.fuzzing.values import anything, inputs, mangled

MODEL = "/v2/models/llama"
DEEP = 10_000
"""Lists in lists."""

MOST_CHUNKS = 200
"""Of a body: each takes room on a stack of Triton's."""

_PATHS = (
    *("/v2", "/v2/", "/", "", "*", "/v2/health/live", "/v2/health/ready", "/v2/models/stats", "/metrics", "//v2"),
    *(f"{MODEL}{end}" for end in ("", "/", "/ready", "/config", "/stats", "/versions", "/infer/", "/generate/x")),
    *(f"{MODEL}/versions/{version}/infer" for version in ("1", "2", "-1", "x", "99999999999999999999", "")),
    *(f"/v2/models/{model}/generate" for model in ("", "x", "llama%00", "..", "%2e%2e%2fllama", "l" * 3000, "\u00e9")),
    f"{MODEL}/generate?{'a=b&' * 300}",
    f"http://localhost{MODEL}/infer",
)
_METHODS = ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "post", "X" * 300, "")
_HEADERS = (
    *("Expect: 100-continue", "Upgrade: websocket", "Connection: upgrade", "Content-Type: text/plain", "no colon"),
    *("Content-Type: application/x-www-form-urlencoded", "Content-Type: multipart/form-data; boundary=x", ": empty"),
    *("Accept-Encoding: gzip", "Accept-Encoding: deflate, *;q=0", "Range: bytes=0-1", "X: " + "y" * 5000, " folded: x"),
    *("triton-llama-key: x", "triton_grpc_error: true", "traceparent: 00-x", "Host: \u00e9"),
    "Inference-Header-Content-Length: 5",
)
_CODINGS = ("gzip", "deflate", "identity", "br", "gzip, gzip")
_INFLATING = gzip.compress(b'{"text_input": "' + b"a" * 300_000 + b'"}', mtime=0)

_FRAMES = ("more", "less", "none", "number", "twice", "no end", "bad chunk")
_LENGTHS = (-1, 2**31, 2**63 - 1, 2**64, 10**30, "x", "", "1x", "0x10", "1 1", "+1", "1.5")
_CHUNK_SIZES = (b"ffffffffffffffff", b"-1", b"zz", b"", b"7fffffff", b"5;x=y", b"fffffffff0")

_STATEMENTS: SearchStrategy[bytes] = st.one_of(
    st.builds(to_json, inputs, st.booleans()),
    st.builds(to_json, inputs, st.booleans()),
    st.builds(to_json, anything, st.booleans()),
    st.sampled_from([b"", b"{", b"[" * DEEP, b'{"a":' * DEEP, b'{"text_input":"x","text_input":"y"}', b"\xff" * 40]),
)


_kinds = st.sampled_from(["generate", "generate", "generate_stream", "infer", "infer", "infer"])
# In every second request something else than the body may be wrong, too.
_wrongs = st.sampled_from([*[""] * 6, "path", "method", "header", "coding", "chunks", "frame"])
_paths = st.sampled_from(_PATHS) | st.sampled_from(_PATHS) | st.text(max_size=20).map(lambda text: f"{MODEL}/{text}")
_methods = st.sampled_from(_METHODS)
_headers = st.lists(st.sampled_from(_HEADERS), min_size=1, max_size=3)
_bodies = infer_bodies()
_packings = st.sampled_from(["gzip", "zlib", "cut", "inflating", "plain"])
_codings = st.sampled_from(_CODINGS)
_sizes = st.sampled_from([1, 7, 4096])
_frames = st.sampled_from(_FRAMES)
_more = st.sampled_from([1, 2, 1000, 3_000_000])
_lengths = st.sampled_from(_LENGTHS)
_chunk_sizes = st.sampled_from(_CHUNK_SIZES)


@st.composite
def http_requests(draw: st.DrawFn) -> HttpBytes:
    """Requests to /generate, /generate_stream, /infer and everywhere else."""
    kind = draw(_kinds)
    sent = draw(_bodies) if kind == "infer" else InferBody(draw(_STATEMENTS))
    body = draw(mangled(sent.content))
    method, path = "POST", f"{MODEL}/{kind}"
    headers = ["Host: x", "Connection: close"]
    if sent.json_bytes is not None:
        headers.append(f"Inference-Header-Content-Length: {sent.json_bytes}")
    wrong = draw(_wrongs)
    if wrong == "path":
        path = draw(_paths)
    elif wrong == "method":
        method = draw(_methods)
    elif wrong == "header":
        headers += draw(_headers)
    elif wrong == "coding":
        body = _pack(body, draw(_packings))
        headers.append(f"Content-Encoding: {draw(_codings)}")
    whole = wrong != "frame"
    framing = [f"Content-Length: {len(body)}"]
    if wrong == "chunks":
        framing, body = ["Transfer-Encoding: chunked"], _chunks(body, draw(_sizes)) + b"0\r\n\r\n"
    elif wrong == "frame":
        framing, body = draw(_misframed(body))
    head = "\r\n".join([f"{method} {path} HTTP/1.1", *headers, *framing, "", ""])
    return HttpBytes(head.encode("utf-8", "surrogatepass") + body, whole)


@st.composite
def _misframed(draw: st.DrawFn, body: bytes) -> tuple[list[str], bytes]:
    """Return headers that say wrongly, or not at all, where a body ends, and its bytes."""
    size = len(body)
    match draw(_frames):
        case "more":
            return [f"Content-Length: {size + draw(_more)}"], body
        case "less":
            return [f"Content-Length: {size // 2}"], body
        case "none":
            return [], body
        case "number":
            return [f"Content-Length: {draw(_lengths)}"], body
        case "twice":
            return [f"Content-Length: {size}", f"Content-Length: {size // 2}"], body
        case "no end":
            return ["Transfer-Encoding: chunked"], _chunks(body, 7)
        case _:
            both = ["Transfer-Encoding: chunked", f"Content-Length: {size}"]
            return both, draw(_chunk_sizes) + b"\r\n" + body + b"\r\n0\r\n\r\n"


def _pack(body: bytes, packing: str) -> bytes:
    """Return a body compressed in some way, cut off behind that, or one that becomes large."""
    match packing:
        case "gzip":
            return gzip.compress(body, mtime=0)
        case "zlib":
            return zlib.compress(body)
        case "cut":
            return gzip.compress(body, mtime=0)[:-9]
        case "inflating":
            return _INFLATING
        case _:
            return body


def _chunks(body: bytes, size: int) -> bytes:
    """Return a body in chunks of about that size, without the last one."""
    size = max(size, len(body) // MOST_CHUNKS + 1)
    pieces = (body[start : start + size] for start in range(0, len(body), size))
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
