"""The state of a server and its model, decoded from Triton's JSON.

The protocols differ: gRPC's JSON has 64-bit numbers as text, and omits values that are zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

from triton_llama.endpoint import Endpoint
from triton_llama.errors import ServerError


@dataclass(frozen=True)
class ModelConfig:
    """The live configuration of the model."""

    backend: str
    max_batch_size: int
    dynamic_batching: bool
    """False: requests are executed one by one."""
    preferred_batch_sizes: tuple[int, ...]
    max_queue_delay_microseconds: int
    """How long the batcher delays a smaller batch."""
    decoupled: bool
    """True: several responses per request (streaming)."""
    parameters: Mapping[str, str]
    """The settings written in the config (`quantization`, `scheduling`, ...)."""


@dataclass(frozen=True)
class ServerStatus:
    """The state of a server that answered."""

    url: str
    live: bool
    ready: bool
    server: str
    server_version: str
    model: str
    model_ready: bool
    config: ModelConfig | None
    """None while the model isn't ready."""
    client_version: str
    tritonclient_version: str


def read_status(
    endpoint: Endpoint,
    model: str,
    live: bool,
    ready: bool,
    metadata: Mapping[str, object],
    model_ready: bool,
    config: Mapping[str, object] | None,
) -> ServerStatus:
    """Put the answers to the five questions together.

    Raises:
        ServerError: they aren't Triton's.
    """
    return ServerStatus(
        url=str(endpoint),
        live=live,
        ready=ready,
        server=_text(metadata, "name"),
        server_version=_text(metadata, "version"),
        model=model,
        model_ready=model_ready,
        config=None if config is None else read_config(config),
        client_version=version("triton-llama"),
        tritonclient_version=version("tritonclient"),
    )


def read_config(config: Mapping[str, object]) -> ModelConfig:
    """Decode Triton's model configuration, in its JSON form."""
    batching = config.get("dynamic_batching")
    batcher = _mapping(config, "dynamic_batching")
    sizes = batcher.get("preferred_batch_size", [])
    if not isinstance(sizes, list):
        raise ServerError(f"the server's config has preferred_batch_size {sizes!r}, must be a list")
    parameters = _mapping(config, "parameters")
    return ModelConfig(
        backend=_text(config, "backend"),
        max_batch_size=_number(config, "max_batch_size"),
        dynamic_batching=batching is not None,
        preferred_batch_sizes=tuple(int(size) for size in sizes),
        max_queue_delay_microseconds=_number(batcher, "max_queue_delay_microseconds"),
        decoupled=bool(_mapping(config, "model_transaction_policy").get("decoupled", False)),
        parameters={name: _text(_mapping(parameters, name), "string_value") for name in sorted(parameters)},
    )


def _mapping(source: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = source.get(name) or {}
    if not isinstance(value, dict):
        raise ServerError(f"the server's {name} is {value!r}, must be an object")
    return value


def _text(source: Mapping[str, object], name: str) -> str:
    value = source.get(name, "")
    if not isinstance(value, str):
        raise ServerError(f"the server's {name} is {value!r}, must be a string")
    return value


def _number(source: Mapping[str, object], name: str) -> int:
    value = source.get(name, 0)
    if not isinstance(value, (int, str)):
        raise ServerError(f"the server's {name} is {value!r}, must be a number")
    try:
        return int(value)
    except ValueError as error:
        raise ServerError(f"the server's {name} is {value!r}, must be a number") from error
