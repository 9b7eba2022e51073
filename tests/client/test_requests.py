"""Addresses, limits, the state of server and model, and the signatures of both clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from client.peers import HOST, respond, server
from triton_llama import LlamaClient, ServerError
from triton_llama.cli import status_lines
from triton_llama.endpoint import Endpoint, Protocol
from triton_llama.status import (
    CacheInfo,
    InstanceInfo,
    ModelConfig,
    ModelInfo,
    NoModelInfoError,
    ServerStatus,
    metrics_address,
    read_config,
    read_model_info,
)


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


@pytest.mark.parametrize("config", [{"max_batch_size": "many"}, {"parameters": [1]}, {"dynamic_batching": 3}])
def test_a_configuration_that_is_not_tritons_is_the_servers_error(config: dict[str, object]) -> None:
    with pytest.raises(ServerError, match="the server's configuration is not Triton's: "):
        read_config(config)


EXACT = InstanceInfo("llama_0_0", "exact INT8, two terms", "bfloat16", "cpu")
FLOATS = InstanceInfo("llama_1_0", "float32 weights: not batch-invariant", "float32", "cpu")
STATUS = ServerStatus("http://a:1", True, True, "triton", "2.51.0", "llama", True, None, "0.1", "2.73")


def _series(model: str, info: InstanceInfo) -> str:
    labels = {"model": model, "version": "1", "model_instance": info.instance, **info._asdict()}
    del labels["instance"]
    listed = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"llama_model_info{{{listed}}} 1"


OTHER = _series("other", EXACT)


@contextmanager
def metrics_page(*lines: str) -> Iterator[str]:
    """Serve a page of these lines; yields its address."""
    body = "\n".join([*lines, ""])
    with server(respond(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())) as port:
        yield f"{HOST}:{port}"


@pytest.mark.parametrize(
    ("lines", "instances"),
    [
        ([_series("llama", EXACT), OTHER, _series("llama", FLOATS)], [EXACT, FLOATS]),
        ([], None),
        ([OTHER], None),
    ],
)
def test_the_instances_of_the_model_are_read_from_the_page(
    lines: list[str], instances: list[InstanceInfo] | None
) -> None:
    with metrics_page("# TYPE llama_model_info gauge", *lines, 'llama_slots{model="llama"} 4') as page:
        if instances is None:
            with pytest.raises(NoModelInfoError, match=f"^{page} has no llama_model_info of the model llama$"):
                read_model_info(page, "llama")
        else:
            assert read_model_info(page, "llama") == ModelInfo(instances, {})


@pytest.mark.parametrize(
    ("url", "protocol", "expected"),
    [("a", "http", "a:8002"), ("a", "grpc", "a:8002"), ("[::1]:9000", "http", "[::1]:9002"), ("a:7", "grpc", "a:8")],
)
def test_the_metrics_port_is_beside_the_endpoint(url: str, protocol: Protocol, expected: str) -> None:
    assert str(metrics_address(Endpoint.parse(url, protocol))) == expected


def test_shares_of_two_terms_are_read_from_the_page() -> None:
    lines = [
        _series("llama", EXACT),
        *(f'llama_int8_{name}_total{{linear="{linear}",model="{model}",version="1"}} {value}'
          for name, linear, model, value in (
              ("columns", "down", "llama", 400), ("columns", "head", "llama", 8), ("columns", "gate_up", "llama", 0),
              ("outlier_columns", "down", "llama", 396), ("outlier_columns", "head", "llama", 0),
              ("outlier_columns", "gate_up", "llama", 0), ("columns", "down", "other", 1),
          )),
    ]  # fmt: skip
    with metrics_page(*lines) as page:
        info = read_model_info(page, "llama")
    assert info == ModelInfo([EXACT], {"down": 0.99, "head": 0.0})
    assert "outliers    columns with two terms: down 99.0%, head 0.0%" in status_lines(STATUS, info, None)


@pytest.mark.parametrize(
    ("queries", "hit_ratio", "hits"), [(400, 0.25, "; 25.0% of prompt tokens were cached"), (0, None, "")]
)
def test_the_kv_cache_of_all_instances_is_read_from_the_page(queries: int, hit_ratio: float | None, hits: str) -> None:
    states = ("used", "cached", "free")
    pages = {"llama_0_0": (3, 4, 1), "llama_1_0": (2, 0, 6)}
    lines = [
        _series("llama", EXACT),
        *(f'llama_kv_cache_pages{{model="llama",model_instance="{instance}",state="{state}",version="1"}} {count}'
          for instance, counts in pages.items() for state, count in zip(states, counts, strict=True)),
        f'llama_prefix_cache_queries_total{{model="llama",version="1"}} {queries}',
        'llama_prefix_cache_hits_total{model="llama",version="1"} 100',
    ]  # fmt: skip
    with metrics_page(*lines) as page:
        info = read_model_info(page, "llama")
    assert info.cache == CacheInfo(pages=16, used=5, cached=4, hit_ratio=hit_ratio)
    line = f"KV cache    5 of 16 pages used, 4 hold cached prefixes{hits}"
    assert line in status_lines(STATUS, info, None)


def test_drafts_are_counted_by_source() -> None:
    lines = [
        f'llama_{name}_tokens_total{{model="llama",source="{source}",version="1"}} {count}'
        for name, source, count in (("draft", "text", 40), ("accepted_draft", "text", 30), ("draft", "guide", 0))
    ]
    with metrics_page(_series("llama", EXACT), *lines) as page:
        info = read_model_info(page, "llama")
    assert info.drafts == {"text": (30, 40)}
    assert "drafts      right guesses: text 30 of 40" in status_lines(STATUS, info, None)


def test_status_has_a_line_for_each_instance() -> None:
    assert list(status_lines(STATUS, ModelInfo([EXACT, FLOATS], {}), None))[2:-1] == [
        "computes    exact INT8, two terms; KV cache bfloat16; on cpu (llama_0_0)",
        "computes    float32 weights: not batch-invariant; KV cache float32; on cpu (llama_1_0)",
    ]
