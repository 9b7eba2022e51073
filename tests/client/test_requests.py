"""Addresses, limits, the state of server and model, and the signatures of both clients."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
from client.peers import serve_page
from triton_llama import LlamaClient, ServerError
from triton_llama.endpoint import Endpoint, Protocol
from triton_llama.status import (
    InstanceInfo,
    ModelConfig,
    ModelInfo,
    NoModelInfoError,
    ServerStatus,
    metrics_address,
    read_config,
    read_model_info,
    status_lines,
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
        ("http://a b", "http"),
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


def _series(name: str, value: int, model: str = "llama", **labels: str) -> str:
    listed = ",".join(f'{key}="{label}"' for key, label in {**labels, "model": model, "version": "1"}.items())
    return f"llama_{name}{{{listed}}} {value}"


def _info(model: str, info: InstanceInfo) -> str:
    labels = {"computation": info.computation, "kv_cache_dtype": info.kv_cache_dtype, "device": info.device}
    return _series("model_info", 1, model, model_instance=info.instance, **labels)


OTHER = _info("other", EXACT)


def metrics_page(*lines: str) -> AbstractContextManager[str]:
    return serve_page(lambda: "\n".join([*lines, ""]))


@pytest.mark.parametrize(
    ("lines", "instances"),
    [
        ([_info("llama", EXACT), OTHER, _info("llama", FLOATS)], [EXACT, FLOATS]),
        ([], None),
        ([OTHER], None),
    ],
)
def test_the_instances_of_the_model_are_read_from_the_page(
    lines: list[str], instances: list[InstanceInfo] | None
) -> None:
    with metrics_page("# TYPE llama_model_info gauge", *lines, 'llama_slots{model="llama"} 4') as address:
        if instances is None:
            with pytest.raises(NoModelInfoError, match=f"^{address} has no llama_model_info of the model llama$"):
                read_model_info(address, "llama")
        else:
            assert read_model_info(address, "llama") == ModelInfo(instances, {})


@pytest.mark.parametrize(
    ("url", "protocol", "expected"),
    [("a", "http", "a:8002"), ("a", "grpc", "a:8002"), ("[::1]:9000", "http", "[::1]:9002"), ("a:7", "grpc", "a:8")],
)
def test_the_metrics_port_is_beside_the_endpoint(url: str, protocol: Protocol, expected: str) -> None:
    assert str(metrics_address(Endpoint.parse(url, protocol))) == expected


PAGES = [
    _series("kv_cache_pages", count, model_instance=instance, state=state)
    for instance, counts in {"llama_0_0": (3, 4, 1), "llama_1_0": (2, 0, 6)}.items()
    for state, count in zip(("used", "cached", "free"), counts, strict=True)
]


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (
            [
                *(_series("int8_columns_total", n, linear=name) for name, n in (("down", 400), ("head", 8), ("up", 0))),
                *(_series("int8_outlier_columns_total", n, linear=name) for name, n in (("down", 396), ("head", 0))),
                _series("int8_columns_total", 1, "other", linear="down"),
            ],
            "outliers    columns with two terms: down 99.0%, head 0.0%",
        ),
        (
            [*PAGES, _series("prefix_cache_queries_total", 400), _series("prefix_cache_hits_total", 100)],
            "KV cache    5 of 16 pages used, 4 hold cached prefixes; 25.0% of prompt tokens were cached",
        ),
        (
            [*PAGES, _series("prefix_cache_queries_total", 0), _series("prefix_cache_hits_total", 0)],
            "KV cache    5 of 16 pages used, 4 hold cached prefixes",
        ),
        (
            [
                *(
                    _series("draft_tokens_total", count, source=source)
                    for source, count in (("text", 40), ("guide", 0))
                ),
                _series("accepted_draft_tokens_total", 30, source="text"),
            ],
            "drafts      right guesses: text 30 of 40",
        ),
    ],
    ids=["outliers", "cache", "unused cache", "drafts"],
)
def test_status_shows_what_the_page_counts(lines: list[str], shown: str) -> None:
    with metrics_page(_info("llama", EXACT), *lines) as address:
        assert shown in status_lines(STATUS, read_model_info(address, "llama"), None)


def test_status_has_a_line_for_each_instance() -> None:
    assert list(status_lines(STATUS, ModelInfo([EXACT, FLOATS], {}), None))[2:-1] == [
        "computes    exact INT8, two terms; KV cache bfloat16; on cpu (llama_0_0)",
        "computes    float32 weights: not batch-invariant; KV cache float32; on cpu (llama_1_0)",
    ]
