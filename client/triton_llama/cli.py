"""The command line `triton-llama`: complete a prompt, run a batch, or show the state of a server.

The bounds of the parameters are the server's, which checks them; the command line doesn't.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import cast

import click

from triton_llama.address import Protocol, ServerAddress
from triton_llama.batch.command import run_batch
from triton_llama.client import AsyncLlamaClient, LlamaClient
from triton_llama.errors import (
    AccessDeniedError,
    LlamaConnectionError,
    LlamaTimeoutError,
    OverloadedError,
    RejectedInputError,
    TritonLlamaError,
)
from triton_llama.metrics_page import NoMetricsError, metrics_address
from triton_llama.sampling_params import INPUTS, SamplingOptions, SamplingParams
from triton_llama.status import ModelInfo, read_model_info, status_lines

SERVER_ERROR = 7
_EXIT_CODES: Mapping[int, tuple[type[TritonLlamaError] | None, str]] = {
    0: (None, "everything was answered"),
    1: (None, "another failure: a closed pipe, Ctrl-C"),
    2: (None, "wrong use of the command line"),
    3: (LlamaConnectionError, "no connection to the server, or it broke"),
    4: (LlamaTimeoutError, "no answer in time"),
    5: (RejectedInputError, "input rejected; run-batch: some lines have no answer"),
    6: (OverloadedError, "server overloaded; try later"),
    SERVER_ERROR: (None, "server error, model not found or not ready"),
    8: (AccessDeniedError, "access denied: 401 or 403"),
}
_EPILOG = "\n".join(["\b\nExit codes:", *(f"  {code}  {cause}" for code, (_, cause) in _EXIT_CODES.items())])
_TYPES: dict[str, click.types.ParamType[object]] = {
    "STRING": click.STRING,
    "INT32": click.INT,
    "UINT64": click.INT,
    "FP32": click.FLOAT,
    "BOOL": click.BOOL,
}
_CHUNK_FIELDS = (
    *("text", "finish_reason", "num_input_tokens", "num_output_tokens", "num_cached_tokens"),
    *("num_accepted_draft_tokens", "num_rejected_draft_tokens"),
)

Command = Callable[..., None]


class _Commands(click.Group):
    """Every error of a request is one line and has its exit code."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except TritonLlamaError as error:
            click.echo(f"Error: {error}", err=True)
            codes = (code for code, (kind, _) in _EXIT_CODES.items() if kind and isinstance(error, kind))
            ctx.exit(next(codes, SERVER_ERROR))


def _protocol(url: str) -> Protocol:
    return "grpc" if url.startswith(("grpc://", "grpcs://")) else "http"


def _check_url(_context: click.Context, _parameter: click.Parameter, url: str) -> str:
    try:
        ServerAddress.parse(url, _protocol(url))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return url


def _server_options(command: Command) -> Command:
    """Add the options of the server and model."""
    seconds = click.FloatRange(min=0, min_open=True)
    for option in (
        click.option(
            "--connect-timeout", type=seconds, default=5.0, show_default=True, help="Seconds of it to connect."
        ),
        click.option("--timeout", type=seconds, default=60.0, show_default=True, help="Seconds for one request."),
        click.option("--model", default="llama", show_default=True, help="The model's name in the repository."),
        click.option(
            "--url",
            envvar="TRITON_LLAMA_URL",
            show_envvar=True,
            default="localhost",
            show_default=True,
            callback=_check_url,
            help="HOST:PORT, or with http://, https://, grpc://, grpcs://.",
        ),
    ):
        command = option(command)
    return command


def _sampling_options(command: Command) -> Command:
    """Add an option for each field of `SamplingParams`."""
    for field in reversed(fields(SamplingParams)):
        datatype, is_list = INPUTS[field.name]
        # Without a default for click: --from-checkpoint needs to know which options were given.
        default = "" if field.default in (None, ()) else f"[default: {field.default}]"
        option = f"--{field.name.replace('_', '-')}"
        command = click.option(
            option, type=_TYPES[datatype], multiple=is_list, help="Repeatable." if is_list else default
        )(command)
    return command


@click.group(
    cls=_Commands, commands=[run_batch], epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="triton-llama", message="%(prog)s %(version)s")
def main() -> None:
    """Talk to a Llama that Triton serves."""


@main.command(epilog="docs/api.md has the meaning and the bounds of the parameters.")
@click.argument("prompt", default="-")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line: text, counts, finish_reason, seed.")
@click.option("--stream", "streamed", is_flag=True, help="Print the text as it comes; with --json, an object a chunk.")
@click.option(
    "--from-checkpoint",
    is_flag=True,
    help="Leave what isn't given to the checkpoint's generation config (may cost batching).",
)
@_server_options
@_sampling_options
def generate(
    prompt: str,
    as_json: bool,
    streamed: bool,
    from_checkpoint: bool,
    url: str,
    model: str,
    timeout: float,
    connect_timeout: float,
    **options: object,
) -> None:
    """Complete PROMPT; without it, or with -, complete stdin (less its last line break).

    --stream needs a server of the config `streaming`.
    """
    params = SamplingParams.from_checkpoint() if from_checkpoint else SamplingParams()
    changes = {name: value for name, value in options.items() if value not in (None, ())}
    params = params.with_options(**cast("SamplingOptions", changes))
    if prompt == "-":
        prompt = _read_stdin()
    if streamed:
        # In asyncio Ctrl-C cancels the task: an exception at an arbitrary point can leave gRPC's locks locked.
        streaming = AsyncLlamaClient(url, _protocol(url), model, timeout=timeout, connect_timeout=connect_timeout)
        asyncio.run(_stream(streaming, prompt, params, as_json))
        return
    with LlamaClient(url, _protocol(url), model, timeout=timeout, connect_timeout=connect_timeout) as client:
        completion = client.generate(prompt, params)
    click.echo(json.dumps(asdict(completion), ensure_ascii=False) if as_json else completion.text)


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"stdin is not UTF-8 at byte {error.start}") from error


async def _stream(client: AsyncLlamaClient, prompt: str, params: SamplingParams, as_json: bool) -> None:
    async with client, client.stream(prompt, params) as stream:
        async for chunk in stream:
            if as_json:
                chunk_fields = {name: getattr(chunk, name) for name in _CHUNK_FIELDS}
                chunk_fields |= {"request_id": stream.request_id, "seed": stream.seed}
                click.echo(json.dumps(chunk_fields, ensure_ascii=False))
            else:
                click.echo(chunk.text, nl=False)
    if not as_json:
        click.echo()


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--metrics-url", help="HOST:PORT of Triton's metrics.  [default: beside --url, as Triton's ports are]")
@_server_options
@click.pass_context
def status(
    context: click.Context,
    as_json: bool,
    metrics_url: str | None,
    url: str,
    model: str,
    timeout: float,
    connect_timeout: float,
) -> None:
    """Show the server, the model, how it computes, its KV cache, its live configuration and the versions; exit with 7
    if it isn't ready.
    """
    with LlamaClient(url, _protocol(url), model, timeout=timeout, connect_timeout=connect_timeout) as client:
        state = client.status()
    info = ModelInfo([], {})
    reason = None
    try:
        info = read_model_info(metrics_url or metrics_address(client.server), model)
    except NoMetricsError as error:
        reason = str(error)
    if as_json:
        shown = {
            **asdict(state),
            "instances": [instance._asdict() for instance in info.instances],
            "instances_unknown": reason,
            "outlier_shares": info.outlier_shares,
            "kv_cache": None if info.cache is None else info.cache._asdict(),
            "drafts": {
                source: {"right": right, "guessed": guessed} for source, (right, guessed) in info.drafts.items()
            },
        }
        click.echo(json.dumps(shown, ensure_ascii=False))
    else:
        click.echo("\n".join(status_lines(state, info, reason)))
    context.exit(0 if state.ready and state.model_ready else SERVER_ERROR)
