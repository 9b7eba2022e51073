"""What all answers share, streamed or not: common fields, JSON, and the end of a request whose client leaves."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TypeVar

from starlette.requests import Request
from triton_llama.completion import Chunk

from triton_llama_openai.errors import ClientLeftError
from triton_llama_openai.protocol.schema import JsonObject

T = TypeVar("T")
_encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def response_head(prefix: str, kind: str, model: str, fingerprint: str) -> JsonObject:
    """Return the fields that every object of one answer begins with; its id begins with `prefix`."""
    return {
        "id": f"{prefix}-{secrets.token_hex(16)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint,
    }


def stop_reason(chunk: Chunk, stop_strings: Sequence[str]) -> str | int | None:
    """Return vLLM's stop_reason: the stop string, the stop token's id, or None for an end token or the length."""
    reason = chunk.stop_reason
    if not reason or reason in stop_strings or not reason.isdecimal():
        return reason or None
    return int(reason)


def dumps(value: object) -> bytes:
    """Return JSON in UTF-8."""
    # A lone surrogate, which a call's arguments may escape, becomes an escape again.
    return _encode_json(value).encode(errors="backslashreplace")


def dumps_with(fields: JsonObject, encoded: Mapping[str, bytes]) -> bytes:
    """Return an object as JSON in UTF-8. fields: at least one. encoded: more of them, whose values are JSON already."""
    more = [dumps(name) + b":" + value for name, value in encoded.items()]
    return b",".join([dumps(fields)[:-1], *more]) + b"}"


def join_array(elements: Iterable[bytes]) -> bytes:
    """Return an array of elements that are JSON already."""
    return b"[" + b",".join(elements) + b"]"


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Return the work's result; cancel it when the client disconnects.

    Raises:
        ClientLeftError: the client has left before the work was done.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
