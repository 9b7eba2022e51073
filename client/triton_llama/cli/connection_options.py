"""The options that say which server and which model, shared by all commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

import click

from triton_llama.async_client import AsyncLlamaClient
from triton_llama.client import LlamaClient
from triton_llama.endpoint import Endpoint, Protocol


@dataclass(frozen=True)
class Connection:
    """A server's address and how long to wait for it, in seconds."""

    url: str
    protocol: Protocol
    model: str
    timeout: float
    connect_timeout: float

    def open(self) -> LlamaClient:
        """Make the synchronous client."""
        return LlamaClient(
            self.url, self.protocol, self.model, timeout=self.timeout, connect_timeout=self.connect_timeout
        )

    def open_async(self) -> AsyncLlamaClient:
        """Make the asyncio client."""
        return AsyncLlamaClient(
            self.url, self.protocol, self.model, timeout=self.timeout, connect_timeout=self.connect_timeout
        )


def connection_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options to a command; it gets them, checked, as one argument `connection: Connection`."""

    @wraps(command)
    def with_connection(
        *arguments: object,
        url: str | None,
        protocol: Protocol | None,
        model: str,
        timeout: float,
        connect_timeout: float,
        **others: object,
    ) -> int:
        if protocol is None:
            protocol = "grpc" if url is not None and url.startswith(("grpc://", "grpcs://")) else "http"
        try:
            endpoint = Endpoint.parse(url or "localhost", protocol)
        except ValueError as error:
            raise click.UsageError(str(error), click.get_current_context()) from error
        return command(
            *arguments, connection=Connection(str(endpoint), protocol, model, timeout, connect_timeout), **others
        )

    seconds = click.FloatRange(min=0, min_open=True, max=86400.0)
    options = (
        click.option(
            "--url",
            envvar="TRITON_LLAMA_URL",
            show_envvar=True,
            help="HOST:PORT, or with http://, https://, grpc://, grpcs://.  [default: localhost and Triton's port]",
        ),
        click.option("--protocol", type=click.Choice(["http", "grpc"]), help="[default: as the URL says, else http]"),
        click.option("--model", default="llama", show_default=True, help="The model's name in the repository."),
        click.option("--timeout", type=seconds, default=60.0, show_default=True, help="Seconds for one request."),
        click.option(
            "--connect-timeout", type=seconds, default=5.0, show_default=True, help="Seconds of it to connect."
        ),
    )
    for option in reversed(options):
        with_connection = option(with_connection)
    return with_connection
