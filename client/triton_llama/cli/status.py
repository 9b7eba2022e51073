"""`triton-llama status`: the server, the model, its live configuration, and the versions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import click

from triton_llama.cli.options import Server, server_options
from triton_llama.cli.output import SERVER_ERROR
from triton_llama.status import ModelConfig, ServerStatus


@click.command(short_help="Show the server, the model and its live configuration.")
@click.option("--json", "json_lines", is_flag=True, help="One JSON object.")
@server_options
def status(json_lines: bool, server: Server) -> int:
    """Show the server, the model, its live configuration and the versions; exit with 7 if it isn't ready."""
    with server.open() as client:
        found = client.status()
    click.echo(json.dumps(asdict(found), ensure_ascii=False) if json_lines else "\n".join(_lines(found)))
    return 0 if found.ready and found.model_ready else SERVER_ERROR


def _lines(found: ServerStatus) -> Iterator[str]:
    server = f"{found.server} {found.server_version} at {found.url}"
    yield f"server      {server}: {'live' if found.live else 'not live'}, {'ready' if found.ready else 'not ready'}"
    yield f"model       {found.model}: {'ready' if found.model_ready else 'not ready'}"
    if found.config is not None:
        yield f"batching    {_batching(found.config)}"
        yield f"responses   {'several to a request (decoupled)' if found.config.decoupled else 'one to a request'}"
        for name, value in found.config.parameters.items():
            yield f"parameter   {name} = {value} (the config file's; LLAMA_* may override it)"
    yield f"versions    triton-llama {found.client_version}, tritonclient {found.tritonclient_version}"


def _batching(config: ModelConfig) -> str:
    largest = f"at most {config.max_batch_size}"
    if not config.dynamic_batching:
        return f"{largest}, no dynamic batching"
    preferred = " ".join(str(size) for size in config.preferred_batch_sizes) or "none"
    return f"{largest}, preferred {preferred}, delay {config.max_queue_delay_microseconds / 1000:g} ms"
