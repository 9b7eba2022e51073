"""The two clients: `AsyncLlamaClient`, and `LlamaClient`, whose event loop has a thread of its own."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from threading import Lock, Thread
from typing import Self, TypeVar, Unpack

from triton_llama.base_client import BaseClient, Outcome
from triton_llama.completion import AsyncCompletionStream, Completion, CompletionStream
from triton_llama.endpoint import Endpoint
from triton_llama.errors import LlamaConnectionError
from triton_llama.sampling_params import Options, SamplingParams
from triton_llama.status import ServerStatus

T = TypeVar("T")
Awaited = Coroutine[object, object, T]


class LlamaClient(BaseClient[Completion, list[Completion], list[Outcome], ServerStatus]):
    """A client of one model on one server; threads may share it.

        with LlamaClient("localhost:8000") as client:
            print(client.generate("A list comprehension", max_tokens=40).text)

    It never retries. Create it after a fork, not before: processes can't share connections.
    """

    def _opened(self) -> None:
        self._loop = LoopThread(self.endpoint, self._transport.close)

    def _run(self, request: Awaited[T]) -> T:
        return self._loop.run(request)

    def stream(self, prompt: str, params: SamplingParams | None = None, **options: Unpack[Options]) -> CompletionStream:
        """Complete a prompt piece by piece, as the server generates it; it must serve the config `streaming`.

            with client.stream("A list comprehension", max_tokens=40) as stream:
                for piece in stream:
                    print(piece.text, end="", flush=True)

        The first `next` sends the request. The arguments are those of `generate`; one client can run any number of
        streams, each in its own thread. Leaving the block early cancels the request.

        Raises:
            RejectedInputError: a value no tensor can hold. The stream raises all other errors of `generate`, before its
                first piece or after any. A stream that ends without an error is complete.
        """
        return CompletionStream(*self._stream(prompt, params, options), self._loop)

    def close(self) -> None:
        """Close the connections; requests and streams in flight in other threads end with a LlamaConnectionError."""
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncLlamaClient(
    BaseClient[Awaited[Completion], Awaited[list[Completion]], Awaited[list[Outcome]], Awaited[ServerStatus]]
):
    """`LlamaClient` in asyncio, for the event loop in which it sends its first request.

        async with AsyncLlamaClient("localhost:8000") as client:
            print((await client.generate("A list comprehension", max_tokens=40)).text)

    Cancelling a task ends its request; over gRPC, and for every stream, the server cancels it too.
    """

    def _run(self, request: Awaited[T]) -> Awaited[T]:
        return request

    def stream(
        self, prompt: str, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> AsyncCompletionStream:
        """Complete a prompt piece by piece, as `LlamaClient.stream` does."""
        return AsyncCompletionStream(*self._stream(prompt, params, options))

    async def close(self) -> None:
        """Close the connections; streams in other tasks end with a LlamaConnectionError."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class LoopThread:
    """An event loop in a thread; both start with the first request, and await `end` before they end."""

    def __init__(self, endpoint: Endpoint, end: Callable[[], Awaited[None]]) -> None:
        self._endpoint = endpoint
        self._end = end
        self._lock = Lock()
        self._thread: Thread | None = None
        self._closed = False

    def run(self, coroutine: Awaited[T], *, begun: bool = False) -> T:
        """Run a coroutine in the loop and return its result; an exception here, such as Ctrl-C, cancels it.

        Raises:
            LlamaConnectionError: `close` was called meanwhile or, if the request has `begun` already, before.
            RuntimeError: `close` was called before.
        """
        with self._lock:
            if self._closed:
                coroutine.close()
                raise self._aborted() if begun else RuntimeError("the client is closed")
            if self._thread is None:
                self._start()
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError as error:
            raise self._aborted() from error
        finally:
            future.cancel()

    def close(self) -> None:
        """Abort what runs, and end the thread."""
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self._stop()
            self._thread.join()

    def _start(self) -> None:
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        # Without a reference to this object, so that a client that isn't closed ends its thread when it is collected.
        self._thread = Thread(target=asyncio.run, args=(_serve(started, self._end),), name="triton-llama", daemon=True)
        self._thread.start()
        self._loop, stop = started.result()
        self._stop = weakref.finalize(self, self._loop.call_soon_threadsafe, stop.set)

    def _aborted(self) -> LlamaConnectionError:
        return LlamaConnectionError(f"no connection to {self._endpoint}: the client was closed")


async def _serve(
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]], end: Callable[[], Awaited[None]]
) -> None:
    stop = asyncio.Event()
    started.set_result((asyncio.get_running_loop(), stop))
    await stop.wait()
    await end()
