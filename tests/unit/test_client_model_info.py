"""How a model computes, as the client reads it from the metrics page and `triton-llama status` prints it."""

from __future__ import annotations

import pytest
from triton_llama.cli.status import _lines
from triton_llama.endpoint import Endpoint, Protocol
from triton_llama.model_info import InstanceInfo, NoModelInfoError, metrics_address, read_model_info
from triton_llama.status import ServerStatus
from unit.peers import HOST, respond, server

EXACT = InstanceInfo("llama_0_0", "exact INT8, two terms", "bfloat16", "cpu")
FLOATS = InstanceInfo("llama_1_0", "float32 weights: bits depend on the batch", "float32", "cpu")
STATUS = ServerStatus("http://a:1", True, True, "triton", "2.51.0", "llama", True, None, "0.1", "2.73")


def _series(model: str, info: InstanceInfo) -> str:
    labels = {"model": model, "version": "1", "model_instance": info.instance, **info._asdict()}
    del labels["instance"]
    listed = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"llama_model_info{{{listed}}} 1"


OTHER = _series("other", EXACT)


@pytest.mark.parametrize(
    ("lines", "instances"),
    [
        ([_series("llama", EXACT), OTHER, _series("llama", FLOATS)], [EXACT, FLOATS]),
        ([], None),
        ([OTHER], None),
        (['llama_model_info{model="llama"} 1'], None),
    ],
)
def test_the_instances_of_the_model_are_read_from_the_page(
    lines: list[str], instances: list[InstanceInfo] | None
) -> None:
    body = "\n".join(["# TYPE llama_model_info gauge", *lines, 'llama_slots{model="llama"} 4', ""])
    with server(respond(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())) as port:
        page = f"{HOST}:{port}"
        if instances is None:
            with pytest.raises(NoModelInfoError, match=f"^{page} has no llama_model_info of the model llama$"):
                read_model_info(page, "llama")
        else:
            assert read_model_info(page, "llama") == instances


@pytest.mark.parametrize(
    ("url", "protocol", "expected"),
    [("a", "http", "a:8002"), ("a", "grpc", "a:8002"), ("[::1]:9000", "http", "[::1]:9002"), ("a:7", "grpc", "a:8")],
)
def test_the_metrics_port_is_beside_the_endpoint(url: str, protocol: Protocol, expected: str) -> None:
    assert str(metrics_address(Endpoint.parse(url, protocol))) == expected


def test_status_has_a_line_for_each_instance() -> None:
    assert list(_lines(STATUS, [EXACT, FLOATS], ""))[2:-1] == [
        "computes    exact INT8, two terms; KV cache bfloat16; on cpu (llama_0_0)",
        "computes    float32 weights: bits depend on the batch; KV cache float32; on cpu (llama_1_0)",
    ]
