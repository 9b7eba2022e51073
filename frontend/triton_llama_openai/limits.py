"""Bounds on requests: their headers, their body's bytes and seconds, their number at one time, their messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from triton_llama_openai.errors import ApiError, error_response, invalid
from triton_llama_openai.streaming import ClientLeftError

MAX_HEADER_BYTES = 32 << 10
"""Of all headers. uvicorn ends a connection that sends twice as much."""


class HeaderLimit:
    """ASGI middleware that refuses requests with large headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request, or answer 431."""
        app = self._app
        if sum(len(name) + len(value) for name, value in scope.get("headers", [])) > MAX_HEADER_BYTES:
            message = f"the request's headers are too large; they must be at most {MAX_HEADER_BYTES} bytes"
            app = error_response(ApiError(431, message, None, "headers_too_large"))
        await app(scope, receive, send)


async def read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """Return a request's body.

    Raises:
        ApiError: it is larger than the bound, announced or not, or takes longer than `seconds` to arrive.
        ClientLeftError: the client has left before its end.
    """
    too_large = ApiError(413, f"the body is too large; it must be at most {max_bytes} bytes", None, "body_too_large")
    content_length = request.headers.get("content-length", "")
    if content_length.isdecimal() and int(content_length) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {seconds:g} s to arrive", None, "timeout") from None
    except ClientDisconnect:
        raise ClientLeftError from None
    return bytes(body)


def limited_route(max_requests: int) -> type[APIRoute]:
    """Return a class of routes that together run `max_requests` requests; one more is refused with 503.

    A request counts from before its body to the end of its answer.
    """
    running = 0

    class LimitedRoute(APIRoute):
        async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal running
            if running >= max_requests:
                raise ApiError(503, f"{max_requests} requests are in flight; try again later", None, "overloaded", 1)
            running += 1
            try:
                await super().handle(scope, receive, send)
            finally:
                running -= 1

    return LimitedRoute


def check_messages(messages: Sequence[object], max_messages: int) -> None:
    """Raise ApiError if a conversation has more messages than the bound."""
    if len(messages) > max_messages:
        raise invalid("messages", f"{len(messages)} messages", f"at most {max_messages}")
