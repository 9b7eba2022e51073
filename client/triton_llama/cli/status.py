"""`triton-llama status`: the server, the model, how it computes, its live configuration, and the versions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import click

from triton_llama.cli.options import Server, server_options
from triton_llama.endpoint import Endpoint
from triton_llama.model_info import InstanceInfo, NoModelInfoError, metrics_address, read_model_info
from triton_llama.status import ModelConfig, ServerStatus

SERVER_ERROR = 7
"""Exit code of a server that is not ready, and of a server's error."""


@click.command(short_help="Show the server, the model and its live configuration.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--metrics-url", help="HOST:PORT of Triton's metrics.  [default: beside --url, as Triton's ports are]")
@server_options
def status(as_json: bool, metrics_url: str | None, server: Server) -> int:
    """Show the server, the model, how it computes, its live configuration and the versions; exit with 7 if it isn't
    ready.
    """
    page = metrics_address(Endpoint.parse(server.url, server.protocol)) if metrics_url is None else metrics_url
    with server.open() as client:
        state = client.status()
    instances, reason = _read_instances(page, server.model)
    if as_json:
        fields = {
            **asdict(state),
            "instances": [instance._asdict() for instance in instances],
            "instances_unknown": reason or None,
        }
        click.echo(json.dumps(fields, ensure_ascii=False))
    else:
        click.echo("\n".join(_lines(state, instances, reason)))
    return 0 if state.ready and state.model_ready else SERVER_ERROR


def _read_instances(page: str, model: str) -> tuple[list[InstanceInfo], str]:
    """Return the instances; without metrics none, and the reason."""
    try:
        return read_model_info(page, model), ""
    except NoModelInfoError as error:
        return [], str(error)


def _lines(state: ServerStatus, instances: list[InstanceInfo], reason: str) -> Iterator[str]:
    server = f"{state.server} {state.server_version} at {state.url}"
    yield f"server      {server}: {'live' if state.live else 'not live'}, {'ready' if state.ready else 'not ready'}"
    yield f"model       {state.model}: {'ready' if state.model_ready else 'not ready'}"
    for instance in instances:
        name = f" ({instance.instance})" if len(instances) > 1 else ""
        yield f"computes    {instance.computation}; KV cache {instance.kv_cache_dtype}; on {instance.device}{name}"
    if reason:
        yield f"computes    unknown: {reason}"
    if state.config is not None:
        yield f"batching    {_batching(state.config)}"
        yield f"responses   {'several to a request (decoupled)' if state.config.decoupled else 'one to a request'}"
        for name, value in state.config.parameters.items():
            yield f"parameter   {name} = {value} (the config file's; LLAMA_* may override it)"
    yield f"versions    triton-llama {state.client_version}, tritonclient {state.tritonclient_version}"


def _batching(config: ModelConfig) -> str:
    largest = f"at most {config.max_batch_size}"
    if not config.dynamic_batching:
        return f"{largest}, no dynamic batching"
    preferred = " ".join(str(size) for size in config.preferred_batch_sizes) or "none"
    return f"{largest}, preferred {preferred}, delay {config.max_queue_delay_microseconds / 1000:g} ms"
