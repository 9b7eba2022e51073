"""Addresses, limits, lists of prompts, the live configuration and the package's names: all without a connection."""

from __future__ import annotations

from typing import Any

import pytest
import triton_llama
from triton_llama import (
    AsyncLlamaClient,
    LlamaClient,
    RejectedInputError,
    ServerError,
)
from triton_llama.endpoint import Endpoint, Protocol
from triton_llama.status import ModelConfig, read_config


@pytest.mark.parametrize(
    ("url", "protocol", "expected"),
    [
        ("localhost", "http", "http://localhost:8000"),
        ("localhost", "grpc", "grpc://localhost:8001"),
        ("127.0.0.1:9000", "http", "http://127.0.0.1:9000"),
        ("http://host:80/", "http", "http://host:80"),
        ("https://gateway/llm/v1/", "http", "https://gateway:8000/llm/v1"),
        ("grpcs://host:443", "grpc", "grpcs://host:443"),
        ("[::1]:8000", "http", "http://[::1]:8000"),
    ],
)
def test_a_url_is_parsed_with_tritons_default_ports(url: str, protocol: Protocol, expected: str) -> None:
    assert str(Endpoint.parse(url, protocol)) == expected


@pytest.mark.parametrize(
    ("url", "protocol"),
    [
        ("", "http"),
        (":8000", "http"),
        ("host:port", "http"),
        ("host:0", "http"),
        ("host:65536", "http"),
        ("grpc://host:8001", "http"),
        ("https://host:8001", "grpc"),
        ("grpc://host:8001/path", "grpc"),
        ("http://user@host:8000", "http"),
        ("http://host:8000?x=1", "http"),
    ],
)
def test_a_malformed_url_is_refused_by_name(url: str, protocol: Protocol) -> None:
    with pytest.raises(ValueError, match=r"^url is ") as error:
        Endpoint.parse(url, protocol)
    assert repr(url) in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"protocol": "ftp"}, "protocol is 'ftp', must be 'http' or 'grpc'"),
        ({"timeout": 0}, "timeout is 0, must be a positive"),
        ({"timeout": float("inf")}, "timeout is inf, must be a positive"),
        ({"connect_timeout": float("nan")}, "connect_timeout is nan, must be a positive"),
        ({"concurrency": 0}, "concurrency is 0, must be at least 1"),
    ],
)
def test_an_argument_without_meaning_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaClient("localhost", **arguments)


@pytest.mark.parametrize(
    ("protocol", "headers", "message"),
    [
        ("http", {"Authorization": "Bearer secret\n"}, "header 'Authorization' has a line end"),
        ("http", {"Author\nization": "secret"}, "has a line end or another control character"),
        ("grpc", {"X-User": "secret Zoë"}, "header 'X-User' must be ASCII"),
    ],
)
def test_refusing_a_header_keeps_its_value_secret(protocol: Protocol, headers: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        LlamaClient("localhost", protocol, headers=headers)
    assert "secret" not in str(error.value)


def test_a_list_with_an_unsendable_prompt_is_refused_unsent() -> None:
    with LlamaClient("no-such-host.invalid") as client, pytest.raises(RejectedInputError) as error:
        client.generate(["a", "\ud800"])
    assert error.value.prompt_index == 1


@pytest.mark.parametrize("delay", [10000, "10000"], ids=["http", "grpc"])
def test_the_live_configuration_is_read_from_either_protocols_json(delay: object) -> None:
    """gRPC's has 64-bit numbers as text, and omits what is false."""
    config: dict[str, object] = {
        "backend": "python",
        "max_batch_size": 32,
        "dynamic_batching": {"preferred_batch_size": [4, 8], "max_queue_delay_microseconds": delay},
        "parameters": {"scheduling": {"string_value": "batch"}, "quantization": {"string_value": "int8"}},
    }
    if delay == 10000:
        config["model_transaction_policy"] = {"decoupled": False}
    parameters = {"quantization": "int8", "scheduling": "batch"}
    assert read_config(config) == ModelConfig("python", 32, True, (4, 8), 10000, False, parameters)
    del config["dynamic_batching"]
    assert read_config(config) == ModelConfig("python", 32, False, (), 0, False, parameters)


@pytest.mark.parametrize("config", [{"max_batch_size": "many"}, {"parameters": [1]}, {"dynamic_batching": 3}])
def test_a_configuration_that_is_not_tritons_is_the_servers_error(config: dict[str, object]) -> None:
    with pytest.raises(ServerError, match="the server's configuration is not Triton's: "):
        read_config(config)


@pytest.mark.parametrize("name", triton_llama.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(triton_llama, name).__name__ == name


def test_both_clients_have_the_same_methods_and_arguments() -> None:
    def public(kind: type[object]) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(LlamaClient) == public(AsyncLlamaClient)
    for name in ("__init__", "generate", "status"):
        assert getattr(LlamaClient, name).__annotations__ == getattr(AsyncLlamaClient, name).__annotations__
