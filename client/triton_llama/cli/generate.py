"""`triton-llama generate`: complete a prompt, as a whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict

import click

from triton_llama.cli.options import Server, include_prompt_option, sampling_options, server_options
from triton_llama.errors import RejectedInputError, ServerError
from triton_llama.sampling_params import SamplingParams


@click.command(short_help="Complete a prompt.")
@click.argument("prompt", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line: text, counts, finish_reason, seed.")
@click.option("--stream", "streamed", is_flag=True, help="Print the text as it comes; with --json, an object a chunk.")
@sampling_options
@include_prompt_option
@server_options
def generate(prompt: str | None, as_json: bool, streamed: bool, params: SamplingParams, server: Server) -> None:
    """Complete PROMPT; without it, or with -, complete stdin (less its last line break).

    --stream needs a server of the config `streaming`. Its text ends in a line break even if the stream breaks off;
    stderr and the exit code then tell.
    """
    text = _read_prompt(prompt)
    if streamed:
        # In asyncio Ctrl-C cancels the task: an exception at an arbitrary point can leave gRPC's locks locked.
        asyncio.run(_stream(server, text, params, as_json))
        return
    with server.open() as client:
        completion = client.generate(text, params)
    click.echo(json.dumps(asdict(completion), ensure_ascii=False) if as_json else completion.text)


async def _stream(server: Server, prompt: str, params: SamplingParams, as_json: bool) -> None:
    async with server.open_async() as client, client.stream(prompt, params) as stream:
        try:
            async for chunk in stream:
                if as_json:
                    fields = {**asdict(chunk), "request_id": stream.request_id, "seed": stream.seed}
                    click.echo(json.dumps(fields, ensure_ascii=False))
                else:
                    click.echo(chunk.text, nl=False)
        except RejectedInputError:
            # If the server refuses streams, that is the better message.
            await _check_streaming(server)
            raise
        finally:
            if stream.text and not as_json:
                click.echo()


async def _check_streaming(server: Server) -> None:
    async with server.open_async() as client:
        status = await client.status()
    if status.config is not None and not status.config.decoupled:
        raise ServerError(
            f"the server at {status.url} answers in one response; to stream it must serve the config `streaming` "
            "(make serve VARIANT=streaming)"
        )


def _read_prompt(argument: str | None) -> str:
    """Return the argument, or stdin without its last line break if the argument is absent or `-`."""
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise click.UsageError("PROMPT is missing, and stdin is a terminal", click.get_current_context(silent=True))
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"stdin is not UTF-8 at byte {error.start}") from error
    return text.removesuffix("\n").removesuffix("\r")
