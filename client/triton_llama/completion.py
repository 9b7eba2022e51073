"""Completions: the whole answer to a prompt, its pieces while it is being generated, and streams of these pieces."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from triton_llama.errors import ServerError

if TYPE_CHECKING:
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
    """Tokens of the prompt, the same in every piece."""
    num_output_tokens: int
    """Tokens generated since the piece before; the sum over all pieces is the completion's."""

    def __str__(self) -> str:
        return self.text


class _Joined:
    """The pieces so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.num_output_tokens = 0
        self.last: Piece | None = None

    def add(self, piece: Piece) -> Piece:
        if self.last is not None:
            raise ServerError(f"the server sent a piece after the one with finish_reason {self.last.finish_reason!r}")
        self.texts.append(piece.text)
        self.num_output_tokens += piece.num_output_tokens
        if piece.finish_reason:
            self.last = piece
        return piece

    def end(self) -> None:
        # Without a last piece the text may be cut off anywhere.
        if self.last is None:
            raise ServerError(f"the stream ended after {len(self.texts)} pieces without a finish_reason")


class _Stream:
    def __init__(self, request: PreparedRequest) -> None:
        self.request_id = request.request_id
        """The request's id, in the server's log too."""
        self.seed = request.seed
        """The seed sent: with it the same request gives the same text."""
        self._joined = _Joined()

    @property
    def text(self) -> str:
        """The text so far; complete once the stream has ended."""
        return "".join(self._joined.texts)

    @property
    def completion(self) -> Completion:
        """All pieces as one completion.

        Raises:
            RuntimeError: the last piece hasn't come, or the stream was closed before it.
        """
        last = self._joined.last
        if last is None:
            raise RuntimeError("a stream has no completion before its last piece")
        tokens = last.num_input_tokens, self._joined.num_output_tokens
        return Completion(self.text, last.finish_reason, *tokens, self.request_id, self.seed)


class CompletionStream(_Stream):
    """An iterator over the pieces of one completion, for one thread.

        with client.stream("A list comprehension", max_tokens=40) as stream:
            for piece in stream:
                print(piece.text, end="", flush=True)
        print(stream.completion.finish_reason)

    The first `next` sends the request. Leaving the `with` block before the last piece cancels the request on the
    server; so does `close`, and dropping the last reference to the stream.
    """

    def __init__(self, pieces: Generator[Piece, None, None], request: PreparedRequest) -> None:
        super().__init__(request)
        self._pieces = _checked(pieces, self._joined)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Take no more pieces; unless the last one has come, cancel the request on the server."""
        self._pieces.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncCompletionStream(_Stream):
    """`CompletionStream` in asyncio: `async with`, `async for`, `await stream.close()`."""

    def __init__(self, pieces: AsyncGenerator[Piece, None], request: PreparedRequest) -> None:
        super().__init__(request)
        self._pieces = _checked_async(pieces, self._joined)

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


# Functions, not methods: a generator that refers to its stream would keep an abandoned one, and its request, alive
# until the next run of the garbage collector.
def _checked(pieces: Generator[Piece, None, None], joined: _Joined) -> Generator[Piece, None, None]:
    with closing(pieces):
        for piece in pieces:
            yield joined.add(piece)
    joined.end()


async def _checked_async(pieces: AsyncGenerator[Piece, None], joined: _Joined) -> AsyncGenerator[Piece, None]:
    async with aclosing(pieces):
        async for piece in pieces:
            yield joined.add(piece)
    joined.end()
