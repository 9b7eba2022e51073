"""The state of a server and its model, decoded from Triton's JSON.

The protocols differ: gRPC's JSON has 64-bit numbers as text, and omits values that are zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeVar

from triton_llama.endpoint import Endpoint
from triton_llama.errors import ServerError

T = TypeVar("T")
_KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}


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
    """Put the answers to the five questions together; raises ServerError if they aren't Triton's."""
    return ServerStatus(
        url=str(endpoint),
        live=live,
        ready=ready,
        server=_get(metadata, "name", str),
        server_version=_get(metadata, "version", str),
        model=model,
        model_ready=model_ready,
        config=None if config is None else read_config(config),
        client_version=version("triton-llama"),
        tritonclient_version=version("tritonclient"),
    )


def read_config(config: Mapping[str, object]) -> ModelConfig:
    """Decode Triton's model configuration, in its JSON form."""
    batcher = _get(config, "dynamic_batching", dict)
    parameters = _get(config, "parameters", dict)
    return ModelConfig(
        backend=_get(config, "backend", str),
        max_batch_size=_number(config, "max_batch_size"),
        dynamic_batching=config.get("dynamic_batching") is not None,
        preferred_batch_sizes=tuple(int(size) for size in _get(batcher, "preferred_batch_size", list)),
        max_queue_delay_microseconds=_number(batcher, "max_queue_delay_microseconds"),
        decoupled=bool(_get(config, "model_transaction_policy", dict).get("decoupled", False)),
        parameters={name: _get(_get(parameters, name, dict), "string_value", str) for name in sorted(parameters)},
    )


def _get(source: Mapping[str, object], name: str, kind: type[T]) -> T:
    """Return a field, empty if it is absent; raises ServerError if it is of another kind."""
    value = source.get(name)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ServerError(f"the server's {name} is {value!r}, must be {_KINDS[kind]}")
    return value


def _number(source: Mapping[str, object], name: str) -> int:
    value = source.get(name, 0)
    if not (isinstance(value, int) or (isinstance(value, str) and value.lstrip("-").isdecimal())):
        raise ServerError(f"the server's {name} is {value!r}, must be a number")
    return int(value)
