"""Addresses, limits, the state of server and model, and the signatures of both clients."""

from __future__ import annotations

from typing import Any

import pytest
from client.peers import HOST, respond, serve_page, server
from triton_llama import LlamaClient, ServerError
from triton_llama.address import Protocol, ServerAddress
from triton_llama.metrics_page import NoMetricsError, metrics_address
from triton_llama.status import (
    read_config,
    read_model_info,
)


@pytest.mark.parametrize(
    ("url", "protocol", "expected"),
    [
        ("localhost", "http", "http://localhost:8000"),
        ("localhost", "grpc", "grpc://localhost:8001"),
        ("https://gateway/llm/v1/", "http", "https://gateway:8000/llm/v1"),
        ("grpcs://host:443", "grpc", "grpcs://host:443"),
        ("[::1]:8000", "http", "http://[::1]:8000"),
    ],
)
def test_a_url_is_parsed_with_tritons_default_ports(url: str, protocol: Protocol, expected: str) -> None:
    assert str(ServerAddress.parse(url, protocol)) == expected


@pytest.mark.parametrize(
    ("url", "protocol"),
    [
        ("", "http"),
        ("host:0", "http"),
        ("host:65536", "http"),
        ("https://host:8001", "grpc"),
        ("grpc://host:8001/path", "grpc"),
        ("http://user@host:8000", "http"),
        ("http://host:8000?x=1", "http"),
        ("http://a b", "http"),
    ],
)
def test_a_malformed_url_is_refused_by_name(url: str, protocol: Protocol) -> None:
    with pytest.raises(ValueError, match=r"^url is ") as error:
        ServerAddress.parse(url, protocol)
    assert repr(url) in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"protocol": "ftp"}, "protocol is 'ftp', must be 'http' or 'grpc'"),
        ({"timeout": 0}, "timeout is 0, must be a positive"),
        ({"connect_timeout": float("nan")}, "connect_timeout is nan, must be a positive"),
    ],
)
def test_an_argument_without_meaning_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaClient("localhost", **arguments)


def test_a_configuration_that_is_not_tritons_is_the_servers_error() -> None:
    with pytest.raises(ServerError, match="the server's configuration is not Triton's: "):
        read_config({"parameters": [1]})


OTHER = 'llama_model_info{model="other",version="1"} 1\n'


def test_a_page_without_the_model_is_named() -> None:
    with serve_page(lambda: OTHER) as address, pytest.raises(NoMetricsError) as error:
        read_model_info(address, "llama")
    assert str(error.value) == f"{address} has no llama_model_info of the model llama"


def test_an_error_of_the_metrics_page_is_named() -> None:
    with (
        server(respond(b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n")) as port,
        pytest.raises(NoMetricsError) as error,
    ):
        read_model_info(f"{HOST}:{port}", "llama")
    assert str(error.value) == f"{HOST}:{port} answers /metrics with HTTP 503"


def test_the_metrics_port_is_beside_the_servers() -> None:
    assert metrics_address(ServerAddress.parse("[::1]:9000", "http")) == "[::1]:9002"
    assert metrics_address(ServerAddress.parse("a", "grpc")) == "a:8002"
