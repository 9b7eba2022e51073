"""Hypothesis strategies for what a client sends to the HTTP port: address, headers, framing and body of a request.

One part is wrong at a time, mostly, so that the others are looked at as well.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from server.clients import DTYPES, OUTPUTS
from server.fuzzing import values
from server.fuzzing.attacks import CONTROL, Form, RawBytes
from triton_supervisor.hardening import HTTP_HEADER

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
_CONTROLS = (
    *("/v2/repository/index", "/v2/repository/models/llama/load", "/v2/repository/models/llama/unload"),
    *("/v2/systemsharedmemory/status", "/v2/systemsharedmemory/region/x/register", "/v2/systemsharedmemory/unregister"),
    *("/v2/cudasharedmemory/status", "/v2/cudasharedmemory/region/x/register", "/v2/trace/setting", "/v2/logging"),
)
_STATISTICS = (
    "/v2/models/stats",
    *(f"{MODEL}{end}/stats" for end in ("", "x", "/versions/1", "/versions/9", "/versions/x")),
)
_METHODS = ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "post", "X" * 300, "")
_HEADERS = (
    *("Expect: 100-continue", "Upgrade: websocket", "Connection: upgrade", "Content-Type: text/plain", "no colon"),
    *("Content-Type: application/x-www-form-urlencoded", "Content-Type: multipart/form-data; boundary=x", ": empty"),
    *("Accept-Encoding: gzip", "Accept-Encoding: deflate, *;q=0", "Range: bytes=0-1", "X: " + "y" * 5000, " folded: x"),
    *("triton-llama-key: x", "triton_grpc_error: true", "traceparent: 00-x", "Host: \u00e9"),
    "Inference-Header-Content-Length: 5",
)
_LENGTHS = (-1, 2**31, 2**63 - 1, 2**64, 10**30, "x", "", "1x", "0x10", "1 1", "+1", "1.5")
_CHUNK_SIZES = (b"ffffffffffffffff", b"-1", b"zz", b"", b"7fffffff", b"5;x=y", b"fffffffff0")
_TLS = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20
BEGINNINGS = (
    *(b"", b"\r\n" * 30, b"GET", b"GET / HTTP/9.9\r\n\r\n", b"GET /v2 HTTP/1.1\r\n", b"\x00" * 100, _TLS),
    *(b"POST  \r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    b"POST /v2/models/llama/generate HTTP/1.1\r\n" + b"a: b\r\n" * 200,
)

_parameters = st.dictionaries(
    st.sampled_from(values.PARAMETERS), st.booleans() | values.sizes | values.texts | values.anything, max_size=3
)
_output = st.fixed_dictionaries(
    {"name": st.sampled_from([*OUTPUTS, "text_input", "", "nothing"])},
    optional={"parameters": _parameters.map(values.without_deadly)},
)
_part = values.part | _parameters | st.lists(_output, max_size=3)
_tensor_parts = st.sampled_from(["name", "shape", "datatype", "data", "parameters"])
_wrong_tensor = st.dictionaries(_tensor_parts, _part, max_size=3)
_other_parts = st.dictionaries(st.sampled_from(["id", "parameters", "outputs", "inputs"]), _part, max_size=3)
_said_lengths = st.sampled_from([-1, 1, -4, 4, 100, -(10**6), 10**6, "x", "", "0", "1e3", str(2**31), str(10**30)])


def _json(value: object, escaped: bool = True) -> bytes:
    """Write JSON, lone surrogates and NaN as well; escaped: in ASCII."""
    return json.dumps(value, ensure_ascii=escaped).encode("utf-8", "surrogatepass")


_statements: SearchStrategy[bytes] = values.weighted(
    (3, st.builds(_json, values.inputs, st.booleans())),
    (1, st.builds(_json, values.anything, st.booleans())),
    (1, st.sampled_from([b"", b"{", b"[" * DEEP, b'{"a":' * DEEP, b'{"seed":1,"seed":2}', b"\xff" * 40])),
)


@st.composite
def _infer_bodies(draw: st.DrawFn) -> tuple[bytes, object]:
    """Tensors in JSON alone or behind it, as the KServe protocol with Triton's binary extension has them.

    The second value is how long the body says that its JSON is; None if it doesn't say.
    """
    binary = draw(st.booleans())
    tensors, tails = [], []
    for name, value in draw(values.inputs).items():
        tensor, tail = draw(_tensor(name, value if isinstance(value, list) else [value], binary))
        tensors.append(tensor)
        tails.append(tail)
    whole: dict[str, object] = {"inputs": tensors} | (draw(_other_parts) if draw(values.one_in(6)) else {})
    head = _json(whole, draw(st.booleans()))
    if not binary:
        return head, None
    # Mostly what is true, or near it.
    wrong = draw(_said_lengths) if draw(values.one_in(6)) else 0
    return head + b"".join(tails), len(head) + wrong if isinstance(wrong, int) else wrong


@st.composite
def _tensor(draw: st.DrawFn, name: str, data: list[object], binary: bool) -> tuple[dict[str, Any], bytes]:
    """A tensor in JSON, and the bytes that belong behind it."""
    datatype = DTYPES.get(name, "INT32")
    tensor: dict[str, Any] = {"name": name, "shape": [1, len(data)], "datatype": datatype}
    tail = draw(values.packed_row(data, datatype)) if binary else b""
    tensor |= {"parameters": {"binary_data_size": len(tail)}} if binary else {"data": data}
    # Of one tensor in twelve some parts are wrong, missing, or there twice.
    if draw(values.one_in(12)):
        tensor |= draw(_wrong_tensor)
        tensor.pop(draw(_tensor_parts | st.just("nothing")), None)
        tail += draw(st.binary(max_size=9))
        if not values.survivable(tensor.get("shape")):
            tensor.pop("data", None)
    return tensor, tail


@st.composite
def http_requests(draw: st.DrawFn, unary: str) -> RawBytes:
    """Requests to /generate, /generate_stream, /infer and everywhere else. unary: the model that answers /infer."""
    kind = draw(st.sampled_from([*["generate"] * 3, "generate_stream", *["infer"] * 3]))
    content, json_bytes = draw(_infer_bodies()) if kind == "infer" else (draw(_statements), None)
    body = draw(values.mangled(content))
    model = draw(st.sampled_from(["llama", unary] if kind == "generate" else [unary if kind == "infer" else "llama"]))
    route, method, path = f"/{kind}", "POST", f"/v2/models/{model}/{kind}"
    headers = ["Host: x", "Connection: close"]
    if json_bytes is not None:
        headers.append(f"Inference-Header-Content-Length: {json_bytes}")
    framing = [f"Content-Length: {len(body)}"]
    # In every second request something else than the body may be wrong, too.
    match wrong := draw(st.sampled_from([*[""] * 6, "path", "method", "header", "coding", "chunks", "frame"])):
        case "path":
            route, path = (
                "elsewhere",
                draw(st.sampled_from(_PATHS) | st.text(max_size=20).map(lambda text: f"{MODEL}/{text}")),
            )
        case "method":
            method = draw(st.sampled_from(_METHODS))
        case "header":
            headers += draw(st.lists(st.sampled_from(_HEADERS), min_size=1, max_size=3))
        case "coding":
            zipped = gzip.compress(body, mtime=0)
            body = draw(st.sampled_from((zipped, zlib.compress(body), zipped[:-9], _INFLATING, body)))
            coding = draw(st.sampled_from(("gzip", "deflate", "identity", "br", "gzip, gzip")))
            framing = [f"Content-Length: {len(body)}", f"Content-Encoding: {coding}"]
        case "chunks":
            framing, body = [_CHUNKED], _chunks(body, draw(st.sampled_from([1, 7, 4096]))) + b"0\r\n\r\n"
        case "frame":
            framing, body = draw(_misframed(body))
    ordinary = wrong in ("", "coding", "chunks")
    # A line that ends within the path has no version: Triton's parser waits for what HTTP/1.1 doesn't have.
    unfinished = wrong == "frame" or "\n" in path
    form: Form = "incomplete" if unfinished else "request" if ordinary else "odd request"
    return RawBytes(route, "http", _head(method, path, [*headers, *framing]) + body, form)


def _head(method: str, path: str, headers: Sequence[str]) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", *headers, "", ""]).encode("utf-8", "surrogatepass")


_keys = st.sampled_from([[], [f"{HTTP_HEADER}: "], [f"{HTTP_HEADER}: x"], [f"{HTTP_HEADER}: {'0' * 64}"]])
_questions = st.sampled_from(
    [
        *((CONTROL, method, path) for method in ("GET", "POST") for path in _CONTROLS),
        *(("statistics", method, path) for method in ("GET", "POST") for path in _STATISTICS),
    ]
)


@st.composite
def http_controls(draw: st.DrawFn) -> RawBytes:
    """Requests to the repository's and other restricted APIs, without their key, and to the statistics."""
    route, method, path = draw(_questions)
    body = draw(_statements)
    headers = ["Host: x", "Connection: close", *draw(_keys), f"Content-Length: {len(body)}"]
    return RawBytes(f"{route} over HTTP", "http", _head(method, path, headers) + body, "request")


_CHUNKED = "Transfer-Encoding: chunked"
_INFLATING = gzip.compress(b'{"text_input": "' + b"a" * 300_000 + b'"}', mtime=0)


def _misframed(body: bytes) -> SearchStrategy[tuple[list[str], bytes]]:
    """Headers that say wrongly, or not at all, where a body ends, and its bytes."""
    size = len(body)
    lengths = (*(size + more for more in (1, 2, 1000, 3_000_000)), size // 2, *_LENGTHS)
    return st.one_of(
        st.sampled_from(lengths).map(lambda length: ([f"Content-Length: {length}"], body)),
        st.just(([], body)),
        st.just(([f"Content-Length: {size}", f"Content-Length: {size // 2}"], body)),
        st.just(([_CHUNKED], _chunks(body, 7))),
        st.sampled_from(_CHUNK_SIZES).map(
            lambda said: ([_CHUNKED, f"Content-Length: {size}"], said + b"\r\n" + body + b"\r\n0\r\n\r\n")
        ),
    )


def _chunks(body: bytes, size: int) -> bytes:
    """Return a body in chunks of about that size, without the last one."""
    size = max(size, len(body) // MOST_CHUNKS + 1)
    pieces = (body[start : start + size] for start in range(0, len(body), size))
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


http_noise: SearchStrategy[RawBytes] = st.builds(
    lambda beginning, rest: RawBytes("bytes on the HTTP port", "http", beginning + rest),
    st.sampled_from(BEGINNINGS),
    st.binary(max_size=300),
)
