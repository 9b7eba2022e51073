"""Completions: the whole answer to a prompt, its pieces while it is being generated, and streams of these pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from triton_llama.errors import LlamaConnectionError, ServerError

if TYPE_CHECKING:
    from triton_llama.client import LoopThread
    from triton_llama.tensors import PreparedRequest


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt."""

    text: str
    """The completion alone, or prompt and completion with `exclude_input_in_output=False`."""
    finish_reason: str
    """`stop` (end token or stop string) or `length` (`max_tokens` reached)."""
    num_input_tokens: int
    """Tokens of the prompt."""
    num_output_tokens: int
    """Tokens generated."""
    request_id: str
    """The request's id, in the server's log too."""
    seed: int
    """The seed sent, drawn by the client if the caller gave none: with it the same request gives the same text."""


@dataclass(frozen=True)
class Piece:
    """A chunk of a completion: the text generated since the piece before; `str()` of it is that text."""

    text: str
    """The text of one or several tokens; whole characters only, possibly empty in the last piece."""
    finish_reason: str
    """Empty until the last piece, which has `stop` (end token or stop string) or `length` (`max_tokens` reached)."""
    num_input_tokens: int
    """Tokens of the prompt, in the last piece; 0 before."""
    num_output_tokens: int
    """Tokens generated since the piece before; the sum over all pieces is the completion's."""

    def __str__(self) -> str:
        return self.text


class _Stream:
    """What is known of a stream so far."""

    def __init__(self, pieces: AsyncGenerator[Piece, None], request: PreparedRequest) -> None:
        self.request_id = request.request_id
        """The request's id, in the server's log too."""
        self.seed = request.seed
        """The seed sent: with it the same request gives the same text."""
        self._taken: list[Piece] = []
        self._pieces = _checked(pieces, self._taken)

    @property
    def text(self) -> str:
        """The text so far; complete once the stream has ended."""
        return "".join(piece.text for piece in self._taken)

    @property
    def completion(self) -> Completion:
        """All pieces as one completion.

        Raises:
            RuntimeError: the last piece hasn't come, or the stream was closed before it.
        """
        if not _is_complete(self._taken):
            raise RuntimeError("a stream has no completion before its last piece")
        last, tokens = self._taken[-1], sum(piece.num_output_tokens for piece in self._taken)
        return Completion(self.text, last.finish_reason, last.num_input_tokens, tokens, self.request_id, self.seed)


class AsyncCompletionStream(_Stream):
    """`CompletionStream` in asyncio: `async with`, `async for`, `await stream.close()`."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        return await anext(self._pieces)

    async def close(self) -> None:
        """Take no more pieces; unless the last one has come, cancel the request on the server."""
        await self._pieces.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class CompletionStream(_Stream):
    """An iterator over the pieces of one completion, for one thread.

    The first `next` sends the request. Leaving the `with` block before the last piece cancels the request on the
    server; so does `close`, and dropping the last reference to the stream.
    """

    def __init__(self, pieces: AsyncGenerator[Piece, None], request: PreparedRequest, loop: LoopThread) -> None:
        super().__init__(pieces, request)
        self._loop = loop
        # After Ctrl-C in `next`, the loop is still cancelling it when `close` is called.
        self._lock = asyncio.Lock()

    def close(self) -> None:
        """Take no more pieces; unless the last one has come, cancel the request on the server."""
        # Closing the client has cancelled it.
        with suppress(LlamaConnectionError):
            self._loop.run(self._close(), begun=True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        piece = self._loop.run(self._next(), begun=bool(self._taken))
        if piece is None:
            raise StopIteration
        return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _next(self) -> Piece | None:
        async with self._lock:
            return await anext(self._pieces, None)

    async def _close(self) -> None:
        async with self._lock:
            await self._pieces.aclose()


# A function, not a method: a generator that refers to its stream would keep an abandoned one, and its request, alive
# until the next run of the garbage collector.
async def _checked(pieces: AsyncGenerator[Piece, None], taken: list[Piece]) -> AsyncGenerator[Piece, None]:
    async with aclosing(pieces):
        async for piece in pieces:
            if _is_complete(taken):
                reason = taken[-1].finish_reason
                raise ServerError(f"the server sent a piece after the one with finish_reason {reason!r}")
            taken.append(piece)
            yield piece
    # Without a last piece the text may be cut off anywhere.
    if not _is_complete(taken):
        raise ServerError(f"the stream ended after {len(taken)} pieces without a finish_reason")


def _is_complete(taken: list[Piece]) -> bool:
    return bool(taken and taken[-1].finish_reason)
