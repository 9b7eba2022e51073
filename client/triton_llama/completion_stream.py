"""What `stream` returns: pieces one by one, the completion at the end, and a way to leave before it.

Knows no protocol; a transport's generator brings the pieces, and closing that generator gives the request up.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from types import TracebackType
from typing import TYPE_CHECKING

from triton_llama.completion import Completion
from triton_llama.joined import JoinedPieces
from triton_llama.piece import Piece
from triton_llama.tensors import PreparedRequest

if TYPE_CHECKING:
    from typing import Self


class _Described:
    """What both streams know of their request and its text."""

    def __init__(self, request: PreparedRequest) -> None:
        self.request_id = request.request_id
        """What the client called the request; the server's log names it so too."""
        self.seed = request.seed
        """The seed sent: with it the same request gives the same text."""
        self._joined = JoinedPieces(request)

    @property
    def text(self) -> str:
        """The text so far, whole once the stream has ended."""
        return self._joined.text

    @property
    def completion(self) -> Completion:
        """All pieces as one completion.

        Raises:
            RuntimeError: the last piece hasn't come, or the stream was left before it.
        """
        return self._joined.completion()


class CompletionStream(_Described):
    """An iterator over the pieces of one completion, for one thread.

        with client.stream("A list comprehension", max_tokens=40) as stream:
            for piece in stream:
                print(piece.text, end="", flush=True)
        print(stream.completion.finish_reason)

    The request is sent when the first piece is asked for. Leaving the `with` block before the last piece cancels the
    request on the server; without one, `close` does, or the garbage collector once nothing refers to the stream.
    """

    def __init__(self, pieces: Generator[Piece, None, None], request: PreparedRequest) -> None:
        super().__init__(request)
        self._pieces = _checked(pieces, self._joined)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Take no more pieces; unless the last one has come, the request is cancelled on the server."""
        self._pieces.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncCompletionStream(_Described):
    """`CompletionStream`'s twin in asyncio: `async with`, `async for`, `await stream.close()`."""

    def __init__(self, pieces: AsyncGenerator[Piece, None], request: PreparedRequest) -> None:
        super().__init__(request)
        self._pieces = _checked_async(pieces, self._joined)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        return await anext(self._pieces)

    async def close(self) -> None:
        """Take no more pieces; unless the last one has come, the request is cancelled on the server."""
        await self._pieces.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def _checked(pieces: Generator[Piece, None, None], joined: JoinedPieces) -> Generator[Piece, None, None]:
    with closing(pieces):
        for piece in pieces:
            yield joined.add(piece)
    joined.end()


async def _checked_async(pieces: AsyncGenerator[Piece, None], joined: JoinedPieces) -> AsyncGenerator[Piece, None]:
    async with aclosing(pieces):
        async for piece in pieces:
            yield joined.add(piece)
    joined.end()
