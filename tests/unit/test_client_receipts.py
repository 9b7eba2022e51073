"""Receipts in both clients and on the command line, against real sockets and real gRPC servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from click.testing import CliRunner
from triton_llama import AsyncLlamaClient, Candidate, Difference, LlamaClient, ServerError, Verification
from triton_llama.cli import DIFFERENT, main
from triton_llama.endpoint import Protocol
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelStreamInferResponse
from unit.grpc_peers import grpc_server, response, strings
from unit.peers import HOST, answer_with, server
from unit.streaming import both_protocols, event

RECEIPT = {"output_ids": [5, 6], "hash": "00"}
DIFFERENCE = Difference(Candidate(5, " é", 1.5), Candidate(6, "\n", 2.0))
EQUAL = Verification(True, 120, "stop")
EQUAL_JSON = {"equal": True, "tokens": 120, "finish_reason": "stop"}
UNEQUAL = Verification(False, 3, "", DIFFERENCE)
UNEQUAL_JSON = {
    "equal": False, "tokens": 3, "finish_reason": "",
    "difference": {
        "claimed": {"token_id": 5, "text": " é", "logit": 1.5}, "drawn": {"token_id": 6, "text": "\n", "logit": 2.0},
    },
}  # fmt: skip


@contextmanager
def _verifying(protocol: Protocol, *answers: str) -> Iterator[int]:
    """Serve these values of the output to one request."""
    if protocol == "http":
        with server(answer_with(*[event("", verification=answer) for answer in answers])) as port:
            yield port
        return

    def behave(request: ModelInferRequest, _: object) -> Iterator[ModelStreamInferResponse]:
        assert [output.name for output in request.outputs] == ["verification"]
        assert [tensor.name for tensor in request.inputs] == ["verify_receipt"]
        assert request.raw_input_contents[0] == strings(json.dumps(RECEIPT))
        for answer in answers:
            message = ModelStreamInferResponse()
            message.infer_response.outputs.add(name="verification", datatype="BYTES", shape=[1])
            message.infer_response.raw_output_contents.append(strings(answer))
            yield message

    with grpc_server(behave) as port:
        yield port


async def _verify_in_asyncio(port: int, protocol: Protocol) -> Verification:
    async with AsyncLlamaClient(f"{HOST}:{port}", protocol) as client:
        return await client.verify(json.dumps(RECEIPT))


@both_protocols
@pytest.mark.parametrize(("answer", "expected"), [(EQUAL_JSON, EQUAL), (UNEQUAL_JSON, UNEQUAL)])
def test_both_clients_verify_a_receipt(protocol: Protocol, answer: object, expected: Verification) -> None:
    with (
        _verifying(protocol, json.dumps(answer)) as port,
        LlamaClient(f"{HOST}:{port}", protocol, timeout=20) as client,
    ):
        assert client.verify(json.dumps(RECEIPT)) == expected
    with _verifying(protocol, json.dumps(answer)) as port:
        assert asyncio.run(_verify_in_asyncio(port, protocol)) == expected


@both_protocols
@pytest.mark.parametrize("answers", [("{}",), ("[]",), ("{",), ('{"equal": true, "difference": 1}',), (), ("{}", "{}")])
def test_anything_but_one_verification_is_the_servers_error(protocol: Protocol, answers: tuple[str, ...]) -> None:
    with (
        _verifying(protocol, *answers) as port,
        LlamaClient(f"{HOST}:{port}", protocol, timeout=20) as client,
        pytest.raises(ServerError, match=r"must be (a verification|one)$"),
    ):
        client.verify(json.dumps(RECEIPT))


@both_protocols
def test_a_receipt_comes_with_the_last_chunk(protocol: Protocol) -> None:
    last = response(" b", "stop")
    last.infer_response.outputs.add(name="receipt", datatype="BYTES", shape=[1])
    last.infer_response.raw_output_contents.append(strings("{}"))

    def behave(request: ModelInferRequest, _: object) -> Iterator[ModelStreamInferResponse]:
        assert request.outputs[-1].name == "receipt"
        return iter((response("a"), last))

    http = answer_with(event("a"), event(" b", "stop", receipt="{}"))
    with (
        server(http) if protocol == "http" else grpc_server(behave) as port,
        LlamaClient(f"{HOST}:{port}", protocol, timeout=20) as client,
        client.stream("def", receipt=True) as stream,
    ):
        assert [chunk.receipt for chunk in stream] == [None, "{}"]
        assert stream.completion.receipt == "{}"


@pytest.mark.parametrize(
    ("content", "count"),
    [
        (RECEIPT, 1),
        ({"text": "a", "receipt": json.dumps(RECEIPT)}, 1),
        ({"object": "chat.completion", "choices": [{"index": 0, "receipt": RECEIPT}, {"receipt": RECEIPT}]}, 2),
    ],
)
def test_verify_finds_the_receipts_of_an_answer(monkeypatch: pytest.MonkeyPatch, content: object, count: int) -> None:
    received: list[object] = []

    def verify(_: LlamaClient, receipt: str) -> Verification:
        received.append(json.loads(receipt))
        return EQUAL

    monkeypatch.setattr(LlamaClient, "verify", verify)
    result = CliRunner().invoke(main, ["verify", "-"], input=json.dumps(content))
    assert (result.exit_code, result.stdout) == (0, "equal, 120 tokens (stop)\n" * count)
    assert received == [RECEIPT] * count


@pytest.mark.parametrize(
    ("verification", "line"),
    [
        (UNEQUAL, ' after 3 tokens: the receipt '
         'has " é" (token 5, logit 1.5), the server draws "\\n" (token 6, logit 2)'),
        (Verification(False, 3, "stop"), ": the server's text ends after 3 tokens (stop), the receipt's goes on"),
        (Verification(False, 3, ""), ": the receipt ends after 3 tokens, the server's text goes on"),
    ],
)  # fmt: skip
def test_a_different_receipt_has_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, verification: Verification, line: str
) -> None:
    monkeypatch.setattr(LlamaClient, "verify", lambda *_: verification)
    result = CliRunner().invoke(main, ["verify", "-"], input=json.dumps(RECEIPT))
    assert (result.exit_code, result.stdout) == (DIFFERENT, f"different{line}\n")
    assert f"  {DIFFERENT}  a receipt's" in CliRunner().invoke(main, ["--help"]).stdout


def test_json_has_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaClient, "verify", lambda *_: UNEQUAL)
    result = CliRunner().invoke(main, ["verify", "--json", "-"], input=json.dumps(RECEIPT))
    assert json.loads(result.stdout) == UNEQUAL_JSON


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "<stdin> is not JSON"), ("[" * 99999, "<stdin> is not JSON"), ('{"choices": []}', "no receipt")],
)
def test_a_file_without_receipts_is_wrong_use(content: str, message: str) -> None:
    result = CliRunner().invoke(main, ["verify", "-"], input=content)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
