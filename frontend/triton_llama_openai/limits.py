"""Bounds on what clients may send: a body's bytes and seconds, requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from triton_llama_openai.errors import ApiError
from triton_llama_openai.events import ClientLeftError


async def read_body(request: Request, most_bytes: int, seconds: float) -> bytes:
    """Return a request's body.

    Raises:
        ApiError: it is larger than the bound, announced or not, or takes longer than `seconds` to arrive.
        ClientLeftError: the client has left before its end.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > most_bytes:
        raise _too_large(most_bytes)
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > most_bytes:
                    raise _too_large(most_bytes)
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {seconds:g} s to arrive", None, "timeout") from None
    except ClientDisconnect:
        raise ClientLeftError from None
    return b"".join(parts)


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"the body is too large; it must be at most {most_bytes} bytes", None, "body_too_large")


class InFlight:
    """Counts the requests that run, and refuses those beyond the bound."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Count one request for as long as the block lasts. Raises ApiError 503 if there are as many as allowed."""
        if self._count >= self._most:
            raise ApiError(503, f"{self._most} requests are in flight; try again later", None, "overloaded", 1)
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1

    def route_class(self) -> type[APIRoute]:
        """Return the class of routes whose requests are counted, from before their body to the end of their answer."""
        one_more = self.one_more

        class CountedRoute(APIRoute):
            async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
                with one_more():
                    await super().handle(scope, receive, send)

        return CountedRoute
