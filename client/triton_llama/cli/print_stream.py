"""`triton-llama generate --stream`: one completion, written as it comes."""

from __future__ import annotations

import asyncio
from typing import IO

import click

from triton_llama.cli.connection_options import Connection
from triton_llama.cli.output import piece_as_json
from triton_llama.errors import RejectedInputError, ServerError
from triton_llama.sampling_params import SamplingParams


def print_stream(connection: Connection, prompt: str, params: SamplingParams, output: str, json_lines: bool) -> int:
    """Write the pieces, each flushed at once; plain ones are followed by a line break, however they end."""
    with click.open_file(output, "w", encoding="utf-8", lazy=True) as target:
        # In asyncio, where Ctrl-C cancels the task: an exception out of nowhere is more than gRPC's locks can bear.
        asyncio.run(_print(connection, prompt, params, target, json_lines))
    return 0


async def check_streaming(connection: Connection) -> None:
    """Check that the server can stream.

    Raises:
        TritonLlamaError: it can't, or it isn't ready.
    """
    async with connection.open_async() as client:
        status = await client.status()
    if status.config is None:
        raise ServerError(f"the model {status.model} is not ready on {status.url}")
    if not status.config.decoupled:
        raise ServerError(
            f"the server at {status.url} answers in one response; to stream it must serve the config `streaming` "
            "(make serve VARIANT=streaming)"
        )


async def _print(
    connection: Connection, prompt: str, params: SamplingParams, target: IO[str], json_lines: bool
) -> None:
    async with connection.open_async() as client, client.stream(prompt, params) as stream:
        try:
            async for piece in stream:
                target.write(f"{piece_as_json(piece, stream)}\n" if json_lines else piece.text)
                target.flush()
        except RejectedInputError:
            # Perhaps it is only refused because it is a stream; then that is what to say.
            await check_streaming(connection)
            raise
        finally:
            if not json_lines and stream.text:
                target.write("\n")
                target.flush()
