"""`triton-llama status`: the server, the model, how it computes, its live configuration, and the versions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import click

from triton_llama.cli.options import Server, server_options
from triton_llama.cli.output import SERVER_ERROR
from triton_llama.endpoint import Endpoint
from triton_llama.model_info import InstanceInfo, NoModelInfoError, metrics_address, read_model_info
from triton_llama.status import ModelConfig, ServerStatus


@click.command(short_help="Show the server, the model and its live configuration.")
@click.option("--json", "json_lines", is_flag=True, help="One JSON object.")
@click.option("--metrics-url", help="HOST:PORT of Triton's metrics.  [default: beside --url, as Triton's ports are]")
@server_options
def status(json_lines: bool, metrics_url: str | None, server: Server) -> int:
    """Show the server, the model, how it computes, its live configuration and the versions; exit with 7 if it isn't
    ready.
    """
    page = metrics_address(Endpoint.parse(server.url, server.protocol)) if metrics_url is None else metrics_url
    with server.open() as client:
        found = client.status()
    instances, reason = _read_instances(page, server.model)
    if json_lines:
        fields = {
            **asdict(found),
            "instances": [one._asdict() for one in instances],
            "instances_unknown": reason or None,
        }
        click.echo(json.dumps(fields, ensure_ascii=False))
    else:
        click.echo("\n".join(_lines(found, instances, reason)))
    return 0 if found.ready and found.model_ready else SERVER_ERROR


def _read_instances(page: str, model: str) -> tuple[list[InstanceInfo], str]:
    """Return the instances; without metrics none, and the reason."""
    try:
        return read_model_info(page, model), ""
    except NoModelInfoError as error:
        return [], str(error)


def _lines(found: ServerStatus, instances: list[InstanceInfo], reason: str) -> Iterator[str]:
    server = f"{found.server} {found.server_version} at {found.url}"
    yield f"server      {server}: {'live' if found.live else 'not live'}, {'ready' if found.ready else 'not ready'}"
    yield f"model       {found.model}: {'ready' if found.model_ready else 'not ready'}"
    for one in instances:
        name = f" ({one.instance})" if len(instances) > 1 else ""
        yield f"computes    {one.computation}; KV cache {one.kv_cache_dtype}; on {one.device}{name}"
    if reason:
        yield f"computes    unknown: {reason}"
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
