"""The state of a server and its model, decoded from Triton's JSON.

The protocols differ: gRPC's JSON has 64-bit numbers as text, and omits values that are zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    metadata: Mapping[str, Any],
    config: Mapping[str, Any] | None,
) -> ServerStatus:
    """Put the answers to the five questions together. config: None if the model isn't ready.

    Raises:
        ServerError: they aren't Triton's.
    """
    # Takes a while to import, and only this function needs it.
    from importlib.metadata import version

    return ServerStatus(
        url=str(endpoint),
        live=live,
        ready=ready,
        server=str(metadata.get("name", "")),
        server_version=str(metadata.get("version", "")),
        model=model,
        model_ready=config is not None,
        config=None if config is None else read_config(config),
        client_version=version("triton-llama"),
        tritonclient_version=version("tritonclient"),
    )


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Decode Triton's model configuration, in its JSON form.

    Raises:
        ServerError: it isn't Triton's.
    """
    try:
        batcher = config.get("dynamic_batching") or {}
        parameters = config.get("parameters") or {}
        return ModelConfig(
            backend=str(config.get("backend", "")),
            max_batch_size=int(config.get("max_batch_size", 0)),
            dynamic_batching=config.get("dynamic_batching") is not None,
            preferred_batch_sizes=tuple(int(size) for size in batcher.get("preferred_batch_size", [])),
            max_queue_delay_microseconds=int(batcher.get("max_queue_delay_microseconds", 0)),
            decoupled=bool((config.get("model_transaction_policy") or {}).get("decoupled", False)),
            parameters={name: str(parameters[name].get("string_value", "")) for name in sorted(parameters)},
        )
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ServerError(f"the server's configuration is not Triton's: {error}") from error
