"""Pieces put together again to the completion they are pieces of, and the proof that none is missing at the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing

from triton_llama.completion import Completion
from triton_llama.errors import ServerError
from triton_llama.piece import Piece
from triton_llama.tensors import PreparedRequest


class JoinedPieces:
    """The pieces of one request so far."""

    def __init__(self, request: PreparedRequest) -> None:
        self._request = request
        self._texts: list[str] = []
        self._num_output_tokens = 0
        self._last: Piece | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def add(self, piece: Piece) -> Piece:
        """Take in the next piece and hand it on.

        Raises:
            ServerError: the last piece was there already.
        """
        if self._last is not None:
            raise ServerError(f"the server sent a piece after the one with finish_reason {self._last.finish_reason!r}")
        self._texts.append(piece.text)
        self._num_output_tokens += piece.num_output_tokens
        if piece.finish_reason:
            self._last = piece
        return piece

    def end(self) -> None:
        """Check that nothing is missing.

        Raises:
            ServerError: no piece said that it was the last one, so the text may be cut off anywhere.
        """
        if self._last is None:
            raise ServerError(f"the stream ended after {len(self._texts)} pieces without a finish_reason")

    def completion(self) -> Completion:
        """Return the pieces as one completion.

        Raises:
            RuntimeError: the last piece isn't there.
        """
        if self._last is None:
            raise RuntimeError("a stream has no completion before its last piece")
        return Completion(
            text=self.text,
            finish_reason=self._last.finish_reason,
            num_input_tokens=self._last.num_input_tokens,
            num_output_tokens=self._num_output_tokens,
            request_id=self._request.request_id,
            seed=self._request.seed,
        )


def joined(pieces: Generator[Piece, None, None], request: PreparedRequest) -> Completion:
    """Return all pieces as one completion.

    Raises:
        ServerError: the last one is missing, or wasn't the last.
    """
    together = JoinedPieces(request)
    with closing(pieces):
        for piece in pieces:
            together.add(piece)
    together.end()
    return together.completion()


async def joined_async(pieces: AsyncGenerator[Piece, None], request: PreparedRequest) -> Completion:
    """Do what `joined` does."""
    together = JoinedPieces(request)
    async with aclosing(pieces):
        async for piece in pieces:
            together.add(piece)
    together.end()
    return together.completion()
