"""What a server says about itself and its model, and how that is read out of Triton's JSON.

Knows that the two protocols write the same facts differently (gRPC's JSON has 64-bit numbers as text and leaves out
what is zero). Asks for nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

from triton_llama.endpoint import Endpoint
from triton_llama.errors import ServerError


@dataclass(frozen=True)
class ModelConfig:
    """The live configuration of the model, as the server runs it."""

    backend: str
    max_batch_size: int
    dynamic_batching: bool
    """False: requests are executed one by one."""
    preferred_batch_sizes: tuple[int, ...]
    max_queue_delay_microseconds: int
    """How long the batcher holds a smaller batch back."""
    decoupled: bool
    """True: several responses to one request (streaming)."""
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


@dataclass(frozen=True)
class StatusAnswers:
    """The five answers a status is made of; the transports collect them."""

    live: bool
    ready: bool
    metadata: Mapping[str, object]
    model_ready: bool
    config: Mapping[str, object] | None


def read_status(endpoint: Endpoint, model: str, answers: StatusAnswers) -> ServerStatus:
    """Put a status together.

    Raises:
        ServerError: the answers aren't Triton's.
    """
    return ServerStatus(
        url=str(endpoint),
        live=answers.live,
        ready=answers.ready,
        server=_text(answers.metadata, "name"),
        server_version=_text(answers.metadata, "version"),
        model=model,
        model_ready=answers.model_ready,
        config=None if answers.config is None else read_config(answers.config),
        client_version=version("triton-llama"),
        tritonclient_version=version("tritonclient"),
    )


def read_config(config: Mapping[str, object]) -> ModelConfig:
    """Read Triton's model configuration in its JSON form."""
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
