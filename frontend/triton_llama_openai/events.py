"""Server-sent events, and the end of work whose client has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triton_llama_openai.request_record import CLIENT_LEFT

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class ClientLeftError(Exception):
    """The client has closed its connection, so its answer has no reader."""


async def until_disconnect(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """Return the work's result; cancel it when the client disconnects.

    Raises:
        ClientLeftError: the client has left before the work was done.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An answer of events. timeout: seconds for all of it. Its end, whatever the reason, closes their generator."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], timeout: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        # The answer's length isn't known.
        del self.headers["content-length"]
        self._events = events
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come. Raises what the generator raises before its first event."""
        async with aclosing(self._events):
            try:
                # A client that doesn't read can hold back an answer after its last token.
                async with asyncio.timeout(self._timeout):
                    await until_disconnect(receive, self._send(send))
            except ClientLeftError:
                scope["state"]["record"].status = CLIENT_LEFT
            except TimeoutError:
                # The answer's own time has ended before: its client doesn't read, so nothing can close it in order.
                scope["state"]["record"].status = CLIENT_LEFT
                scope["state"]["abort"]()
                await _disconnect(receive)

    async def _send(self, send: Send) -> None:
        # An answer's status can't change once it has begun.
        first = await anext(self._events)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
