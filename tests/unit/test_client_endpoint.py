"""Addresses as people write them, and the client's own limits."""

from __future__ import annotations

from typing import Any

import pytest
from triton_llama import LlamaClient
from triton_llama.endpoint import Endpoint, Protocol


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
def test_an_address_is_read_as_meant(url: str, protocol: Protocol, expected: str) -> None:
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
def test_an_address_that_cannot_be_is_refused_by_name(url: str, protocol: Protocol) -> None:
    with pytest.raises(ValueError, match=r"^url is ") as error:
        Endpoint.parse(url, protocol)
    assert repr(url) in str(error.value)


def test_an_unknown_protocol_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="protocol is 'ftp', must be 'http' or 'grpc'"):
        Endpoint.parse("host", "ftp")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"timeout": 0}, "timeout is 0, must be a positive"),
        ({"timeout": float("inf")}, "timeout is inf, must be a positive"),
        ({"connect_timeout": float("nan")}, "connect_timeout is nan, must be a positive"),
        ({"concurrency": 0}, "concurrency is 0, must be at least 1"),
    ],
)
def test_a_client_without_a_real_limit_is_refused(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaClient("localhost", **limits)
