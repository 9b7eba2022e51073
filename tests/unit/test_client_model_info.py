"""How a model computes, as the client reads it from the metrics page and `triton-llama status` prints it."""

from __future__ import annotations

import pytest
from triton_llama.cli.status import _lines
from triton_llama.endpoint import Endpoint, Protocol
from triton_llama.health import Address, NoAnswerError
from triton_llama.model_info import InstanceInfo, metrics_address, read_model_info
from triton_llama.status import ServerStatus
from unit.peers import HOST, respond, server

EXACT = InstanceInfo("llama_0_0", "exact INT8, two terms", "bfloat16", "cpu")
FLOATS = InstanceInfo("llama_1_0", "float32 weights: bits depend on the batch", "float32", "cpu")
STATUS = ServerStatus("http://a:1", True, True, "triton", "2.51.0", "llama", True, None, "0.1", "2.73")


def _series(model: str, one: InstanceInfo) -> str:
    labels = {"model": model, "version": "1", "model_instance": one.instance, **one._asdict()}
    del labels["instance"]
    listed = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"llama_model_info{{{listed}}} 1"


def _response(*lines: str) -> bytes:
    body = "\n".join(["# TYPE llama_model_info gauge", *lines, 'llama_slots{model="llama"} 4', ""])
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def test_every_instance_of_the_model_is_read_and_no_other_models() -> None:
    page = _response(_series("llama", EXACT), _series("other", EXACT), _series("llama", FLOATS))
    with server(respond(page)) as port:
        assert read_model_info(Address(HOST, port), "llama") == [EXACT, FLOATS]


@pytest.mark.parametrize("lines", [(), (_series("other", EXACT),), ('llama_model_info{model="llama"} 1',)])
def test_a_page_without_the_models_info_is_an_error_that_names_the_page(lines: tuple[str, ...]) -> None:
    with server(respond(_response(*lines))) as port:
        page = Address(HOST, port)
        with pytest.raises(NoAnswerError, match=f"^{page} has no llama_model_info of the model llama$"):
            read_model_info(page, "llama")


@pytest.mark.parametrize(
    ("url", "protocol", "expected"),
    [("a", "http", "a:8002"), ("a", "grpc", "a:8002"), ("[::1]:9000", "http", "[::1]:9002"), ("a:7", "grpc", "a:8")],
)
def test_the_metrics_are_beside_the_endpoint_as_tritons_ports_are(url: str, protocol: Protocol, expected: str) -> None:
    assert str(metrics_address(Endpoint.parse(url, protocol))) == expected


@pytest.mark.parametrize(
    ("instances", "reason", "expected"),
    [
        ([EXACT], "", ["computes    exact INT8, two terms; KV cache bfloat16; on cpu"]),
        ([], "a:3 can't be asked: refused", ["computes    unknown: a:3 can't be asked: refused"]),
        (
            [EXACT, FLOATS],
            "",
            [
                "computes    exact INT8, two terms; KV cache bfloat16; on cpu (llama_0_0)",
                "computes    float32 weights: bits depend on the batch; KV cache float32; on cpu (llama_1_0)",
            ],
        ),
    ],
    ids=["one instance", "no metrics", "two instances"],
)
def test_status_has_a_line_for_each_instance_or_the_reason_why_it_knows_none(
    instances: list[InstanceInfo], reason: str, expected: list[str]
) -> None:
    assert list(_lines(STATUS, instances, reason))[2:-1] == expected
