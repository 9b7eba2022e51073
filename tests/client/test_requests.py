"""Addresses, limits, the state of server and model, and the signatures of both clients."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
from client.peers import HOST, respond, serve_page, server
from triton_llama import LlamaClient, ServerError
from triton_llama.address import Protocol, ServerAddress
from triton_llama.metrics_page import NoMetricsError, metrics_address
from triton_llama.status import (
    InstanceInfo,
    ModelConfig,
    ServerStatus,
    read_config,
    read_model_info,
    status_lines,
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
        ("host:port", "http"),
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


def test_a_configuration_that_is_not_tritons_is_the_servers_error() -> None:
    with pytest.raises(ServerError, match="the server's configuration is not Triton's: "):
        read_config({"parameters": [1]})


EXACT = InstanceInfo("llama_0_0", "exact INT8, two terms", "bfloat16", "cpu")
FLOATS = InstanceInfo("llama_1_0", "float32 weights: not batch-invariant", "float32", "cpu")
STATUS = ServerStatus("http://a:1", True, True, "triton", "2.51.0", "llama", True, None, "0.1", "2.73")


def _series(name: str, value: int, model: str = "llama", **labels: str) -> str:
    listed = ",".join(f'{key}="{label}"' for key, label in {**labels, "model": model, "version": "1"}.items())
    return f"llama_{name}{{{listed}}} {value}"


def _info(model: str, info: InstanceInfo) -> str:
    labels = {"computation": info.computation, "kv_cache_dtype": info.kv_cache_dtype, "device": info.device}
    return _series("model_info", 1, model, model_instance=info.instance, **labels)


def metrics_page(*lines: str) -> AbstractContextManager[str]:
    other = [_info("other", EXACT), _series("int8_columns_total", 1, "other", linear="down")]
    return serve_page(lambda: "\n".join([*other, *lines, ""]))


def test_a_page_without_the_model_is_named() -> None:
    with metrics_page() as address, pytest.raises(NoMetricsError) as error:
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


def test_status_shows_the_models_instances_and_what_the_page_counts() -> None:
    cached = ("used", 3), ("cached", 4), ("free", 1), ("used", 2), ("free", 6)
    lines = [
        _info("llama", EXACT),
        _info("llama", FLOATS),
        *(_series("int8_columns_total", n, linear=name) for name, n in (("down", 400), ("head", 8), ("up", 0))),
        *(_series("int8_outlier_columns_total", n, linear=name) for name, n in (("down", 396), ("head", 0))),
        *(_series("kv_cache_pages", count, state=state) for state, count in cached),
        *(_series("draft_tokens_total", count, source=source) for source, count in (("text", 40), ("guide", 0))),
        _series("accepted_draft_tokens_total", 30, source="text"),
    ]
    looked_up = [_series("prefix_cache_queries_total", 400), _series("prefix_cache_hits_total", 100)]
    with metrics_page(*lines) as unused, metrics_page(*looked_up, *lines) as used:
        before, after = (list(status_lines(STATUS, read_model_info(page, "llama"), None)) for page in (unused, used))
    assert before[2:-1] == [
        "computes    exact INT8, two terms; KV cache bfloat16; on cpu (llama_0_0)",
        "computes    float32 weights: not batch-invariant; KV cache float32; on cpu (llama_1_0)",
        "outliers    columns with two terms: down 99.0%, head 0.0%",
        "KV cache    5 of 16 pages used, 4 hold cached prefixes",
        "drafts      right guesses: text 30 of 40",
    ]
    assert f"{before[5]}; 25.0% of prompt tokens were cached" in after
