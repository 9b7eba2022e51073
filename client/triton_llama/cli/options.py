"""Options that commands share: the server and model, and the sampling parameters.

The bounds in the help are the server's, which checks them; the command line doesn't.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import cast

import click

from triton_llama.async_client import AsyncLlamaClient
from triton_llama.client import LlamaClient
from triton_llama.endpoint import Endpoint, Protocol
from triton_llama.sampling_params import SamplingOptions, SamplingParams

Command = Callable[..., int | None]

_SECONDS = click.FloatRange(min=0, min_open=True, max=86400.0)
_SERVER = (
    click.option(
        "--url",
        envvar="TRITON_LLAMA_URL",
        show_envvar=True,
        help="HOST:PORT, or with http://, https://, grpc://, grpcs://.  [default: localhost and Triton's port]",
    ),
    click.option("--protocol", type=click.Choice(["http", "grpc"]), help="[default: as the URL says, else http]"),
    click.option("--model", default="llama", show_default=True, help="The model's name in the repository."),
    click.option("--timeout", type=_SECONDS, default=60.0, show_default=True, help="Seconds for one request."),
    click.option("--connect-timeout", type=_SECONDS, default=5.0, show_default=True, help="Seconds of it to connect."),
)
# Without defaults for click: --from-checkpoint needs to know which options were given.
_SAMPLING = (
    click.option("--max-tokens", "-n", type=int, help="Tokens to generate at most, >= 1.  [default: 128]"),
    click.option("--min-tokens", type=int, help="Tokens before the text may end, 0 ... max.  [default: 0]"),
    click.option("--temperature", "-t", type=float, help="0 (greedy) ... 2.  [default: 0]"),
    click.option("--top-k", type=int, help="Among the k likeliest tokens, >= 0; 0 = off.  [default: 0]"),
    click.option("--top-p", type=float, help="Among the likeliest of this sum, > 0 ... 1.  [default: 1]"),
    click.option("--repetition-penalty", type=float, help="> 0; 1 = off.  [default: 1]"),
    click.option("--frequency-penalty", type=float, help="-2 ... 2; 0 = off.  [default: 0]"),
    click.option("--presence-penalty", type=float, help="-2 ... 2; 0 = off.  [default: 0]"),
    click.option("--seed", type=int, help="0 ... 2**64 - 1.  [default: drawn, and shown by --json]"),
    click.option("--stop-word", "stop_words", multiple=True, metavar="TEXT", help="End before it; up to 16 times."),
    click.option("--bad-word", "bad_words", multiple=True, metavar="TEXT", help="Never produce it; repeatable."),
    click.option(
        "--from-checkpoint",
        is_flag=True,
        help="Leave what isn't given to the checkpoint's generation config (may cost batching).",
    ),
)
include_prompt_option = click.option("--include-prompt", is_flag=True, help="Print the prompt before its completion.")


@dataclass(frozen=True)
class Server:
    """A client's arguments; timeouts in seconds."""

    url: str
    protocol: Protocol
    model: str
    timeout: float
    connect_timeout: float

    def open(self) -> LlamaClient:
        """Return a synchronous client."""
        return LlamaClient(**vars(self))

    def open_async(self) -> AsyncLlamaClient:
        """Return an asyncio client."""
        return AsyncLlamaClient(**vars(self))


def server_options(command: Command) -> Command:
    """Add the options of the server and model; the command gets one argument `server: Server`."""

    @wraps(command)
    def with_server(
        *arguments: object,
        url: str | None,
        protocol: Protocol | None,
        model: str,
        timeout: float,
        connect_timeout: float,
        **others: object,
    ) -> int | None:
        if protocol is None:
            protocol = "grpc" if url is not None and url.startswith(("grpc://", "grpcs://")) else "http"
        try:
            address = str(Endpoint.parse(url or "localhost", protocol))
        except ValueError as error:
            raise click.UsageError(str(error), click.get_current_context()) from error
        return command(*arguments, server=Server(address, protocol, model, timeout, connect_timeout), **others)

    return _with(_SERVER, with_server)


def sampling_options(command: Command) -> Command:
    """Add an option for each field of `SamplingParams`; the command gets one argument `params: SamplingParams`.

    `include_prompt_option` goes below it.
    """

    @wraps(command)
    def with_params(
        *arguments: object, from_checkpoint: bool, include_prompt: bool = False, **options: object
    ) -> int | None:
        names = SamplingOptions.__annotations__.keys() & options.keys()
        values = {name: options.pop(name) for name in names}
        chosen = {name: value for name, value in values.items() if value not in (None, ())}
        if include_prompt:
            chosen["exclude_input_in_output"] = False
        base = SamplingParams.from_checkpoint() if from_checkpoint else SamplingParams()
        return command(*arguments, params=base.with_options(**cast("SamplingOptions", chosen)), **options)

    return _with(_SAMPLING, with_params)


def _with(options: tuple[Callable[[Command], Command], ...], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
