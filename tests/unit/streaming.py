"""Both clients' streams as one function: the pieces that came, and what they ended in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from triton_llama import AsyncLlamaClient, Completion, LlamaClient, Piece, TritonLlamaError
from triton_llama.endpoint import Protocol
from unit.peers import HOST


@dataclass(frozen=True)
class Streamed:
    """What a stream gave."""

    pieces: list[Piece]
    outcome: Completion | TritonLlamaError

    @property
    def texts(self) -> list[str]:
        return [piece.text for piece in self.pieces]


OnPiece = Callable[[Piece], object]
Stream = Callable[..., Streamed]


def stream(port: int, protocol: Protocol, *, timeout: float = 20.0, on_piece: OnPiece = str) -> Streamed:
    """Stream with the synchronous client; `on_piece` sees each piece when it has come."""
    pieces: list[Piece] = []
    with LlamaClient(f"{HOST}:{port}", protocol, timeout=timeout) as client:
        try:
            with client.stream("def") as running:
                for piece in running:
                    pieces.append(piece)
                    on_piece(piece)
        except TritonLlamaError as error:
            assert running.text == "".join(piece.text for piece in pieces)
            return Streamed(pieces, error)
        return Streamed(pieces, running.completion)


def stream_async(port: int, protocol: Protocol, *, timeout: float = 20.0, on_piece: OnPiece = str) -> Streamed:
    """Stream with the asyncio client."""

    async def run() -> Streamed:
        pieces: list[Piece] = []
        async with AsyncLlamaClient(f"{HOST}:{port}", protocol, timeout=timeout) as client:
            try:
                async with client.stream("def") as running:
                    async for piece in running:
                        pieces.append(piece)
                        on_piece(piece)
            except TritonLlamaError as error:
                assert running.text == "".join(piece.text for piece in pieces)
                return Streamed(pieces, error)
            return Streamed(pieces, running.completion)

    return asyncio.run(run())


both_clients = pytest.mark.parametrize("stream", [stream, stream_async], ids=["sync", "async"])


def event(text: str, reason: str = "", *, prompt_tokens: int = 0, tokens: int = 1) -> bytes:
    """A piece as Triton's event."""
    fields = {
        "text_output": text,
        "finish_reason": reason,
        "num_input_tokens": prompt_tokens,
        "num_output_tokens": tokens,
        "model_name": "llama",
    }
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"
