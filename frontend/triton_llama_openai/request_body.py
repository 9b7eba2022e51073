"""A request's body, read within its bounds, decompressed, and as its schema."""

from __future__ import annotations

import asyncio
import codecs
import zlib
from collections.abc import Callable
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from triton_llama_openai.errors import ApiError, ClientLeftError, from_validation, shorten
from triton_llama_openai.protocol.schema import Schema
from triton_llama_openai.settings import Settings

S = TypeVar("S", bound=Schema)
_ENCODINGS = ("gzip", "deflate")


async def parse_request(request: Request, schema: type[S], settings: Settings) -> S:
    """Return a request's body. Raises ApiError for the first violation of the schema, ClientLeftError."""
    text = await _read_body(request, settings.max_body_bytes, settings.body_timeout)
    try:
        body = schema.model_validate_json(text, extra="allow" if settings.unknown_fields == "ignore" else "forbid")
    except ValidationError as error:
        raise from_validation(error) from error
    request.state.record.ignored = body.ignored()
    return body


async def _read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """Return a request's body, decompressed, without a byte order mark.

    Raises:
        ApiError: it is larger than the bound, announced or not, before or after decompression; it takes longer than
            `seconds` to arrive; or its content encoding is unknown or damaged.
        ClientLeftError: the client has left before its end.
    """
    decompress = _decompressor(request.headers.get("content-encoding", "identity").strip().lower(), max_bytes)
    content_length = request.headers.get("content-length", "")
    if content_length.isdecimal() and int(content_length) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += decompress(part)
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {seconds:g} s to arrive", None, "timeout") from None
    except ClientDisconnect:
        raise ClientLeftError from None
    return bytes(body).removeprefix(codecs.BOM_UTF8)


def _decompressor(encoding: str, max_bytes: int) -> Callable[[bytes], bytes]:
    """Return a function that decodes the body's next part, b"" for its end, to at most `max_bytes` + 1 bytes.

    Raises:
        ApiError: the encoding is unknown; the function raises it for a body in another encoding, or without its end.
    """
    if encoding == "identity":
        return lambda part: part
    if encoding not in _ENCODINGS:
        bound = f"it must be one of {', '.join(_ENCODINGS)}"
        raise ApiError(
            415, f"the body's Content-Encoding is {shorten(encoding)}; {bound}", None, "unsupported_encoding"
        )
    decoder = None

    def decompress(part: bytes) -> bytes:
        nonlocal decoder
        if decoder is None:
            # HTTP's deflate has zlib's header, whose first byte ends in 8; some clients leave it out.
            raw = encoding == "deflate" and part[:1] != b"" and part[0] & 15 != 8
            decoder = zlib.decompressobj(-zlib.MAX_WBITS if raw else zlib.MAX_WBITS | 32)
        try:
            # Without a bound, a body of 4 MiB could unpack to 4 GiB.
            decoded = decoder.decompress(part, max_bytes + 1)
        except zlib.error as error:
            raise _damaged(encoding) from error
        if decoder.unused_data or (not part and not decoder.eof):
            raise _damaged(encoding)
        return decoded

    return decompress


def _damaged(encoding: str) -> ApiError:
    return ApiError(400, f"the body isn't {encoding}, as its Content-Encoding says", None, "invalid_encoding")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is too large; it must be at most {max_bytes} bytes", None, "body_too_large")
