"""Shutdown while Triton holds a model that has answered everything: clients left gRPC streams open."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import grpc
import pytest
from server.clients import ask, generate
from server.fleet import SLOW
from server.metrics import LASTING, Metrics
from server.servers import in_use, new_server
from server.streams import GrpcStream, grpc_stream, whole
from triton_llama import SamplingParams, grpc_wire
from triton_llama.tensors import prepare
from triton_local.server import LocalTriton
from tritonclient.grpc.service_pb2 import ModelInferRequest, ServerMetadataRequest
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

# A client of its own, which prints what it gets and exits without closing its stream.
REFUSED_AND_GONE = """
import os, queue, sys
import numpy, tritonclient.grpc
came = queue.Queue()
client = tritonclient.grpc.InferenceServerClient(sys.argv[1])
client.start_stream(lambda result, error: came.put(error))
for name, datatype, value in (("nonsense", "INT32", 1), ("max_tokens", "BYTES", b"3")):
    given = tritonclient.grpc.InferInput(name, [1, 1], datatype)
    given.set_data_from_numpy(numpy.array([[value]], numpy.object_ if datatype == "BYTES" else numpy.int32))
    client.async_stream_infer("llama", [given])
    print(came.get(timeout=60), flush=True)
os._exit(0)
"""


SLOW_READER_S = 0.018
"""A piece: some eleven seconds for all, of which Triton needs less than one."""


TWO_SLOTS = {"LLAMA_SLOTS": "2", **SLOW}


@pytest.mark.parametrize("variant", ["streaming", pytest.param("default", marks=pytest.mark.long)])
def test_open_streams_answered_or_refused_cost_a_shutdown_no_request(variant: str) -> None:
    with new_server(variant, TWO_SLOTS) as server, in_use("held", server), GrpcStream(server) as idle:
        client = [sys.executable, "-c", REFUSED_AND_GONE, server.grpc_url]
        refusals = subprocess.run(client, capture_output=True, text=True, timeout=100, check=True).stdout
        assert "unexpected inference input 'nonsense'" in refusals
        assert "data-type is 'BYTES', but model 'llama' expects 'INT32'" in refusals
        idle.ask({"text_input": "a", "max_tokens": 1})
        assert idle.next().error is None
        alone = ask(server, generate, **LASTING)
        metrics = Metrics(server)
        ways = (partial(ask, server, generate, **LASTING), lambda: whole(server, grpc_stream, LASTING))
        with ThreadPoolExecutor(4) as pool:
            accepted = [pool.submit(way) for way in (ways if variant == "streaming" else ways[:1] * 2) * 2]
            metrics.wait_for_slots(2, waiting=2)
            server.terminate()
            assert [one.result() for one in accepted] == [alone] * 4
        assert server.wait() == 0
        assert "everything that was accepted is answered, and Triton still holds llama: " in server.log_text()


@pytest.mark.long
def test_clients_that_go_on_asking_do_not_delay_a_shutdown_that_waits_for_readers() -> None:
    over = threading.Event()

    def poll(server: LocalTriton) -> int:
        """Ask whether the server is ready until it is gone; return how often it answered."""
        answered = 0
        with (
            grpc.insecure_channel(server.grpc_url, [("grpc.use_local_subchannel_pool", 1)]) as to,
            suppress(grpc.RpcError),
        ):
            while not over.is_set():
                GRPCInferenceServiceStub(to).ServerMetadata(ServerMetadataRequest(), timeout=10)
                answered += 1
        return answered

    # A grace period beyond the test's own bound.
    with (
        new_server("streaming", options=("--exit-timeout-secs=3600",)) as server,
        in_use("polled", server),
        GrpcStream(server) as idle,
    ):
        idle.ask({"text_input": "a", "max_tokens": 1})
        assert idle.next().error is None
        with ThreadPoolExecutor(1) as pool:
            polling = pool.submit(poll, server)
            server.terminate()
            assert server.wait() == 0
            over.set()
            assert polling.result() > 0


def test_a_shutdown_writes_the_last_traces(tmp_path: Path) -> None:
    traces = tmp_path / "traces.json"
    given = ("mode=triton", f"triton,file={traces}", "rate=1", "level=TIMESTAMPS")
    with new_server(options=[f"--trace-config={one}" for one in given]) as server, in_use("traced", server):
        ask(server, generate, text_input="a", max_tokens=1)
        assert not traces.exists()
        server.terminate()
        assert server.wait() == 0
    assert "REQUEST_START" in traces.read_text()


@pytest.mark.long
def test_a_shutdown_waits_for_a_client_that_reads_its_open_stream_slowly() -> None:
    requests, tokens = 8, 150
    request = prepare("def f():", SamplingParams(max_tokens=tokens, min_tokens=tokens), stream=True)
    with new_server("streaming") as server, in_use("slow-reader", server), grpc.insecure_channel(server.grpc_url) as to:
        closed = threading.Event()

        def asked() -> Iterator[ModelInferRequest]:
            for _ in range(requests):
                yield grpc_wire.infer_request("llama", request)
            closed.wait()

        ended = 0
        stream = GRPCInferenceServiceStub(to).ModelStreamInfer(asked())
        try:
            for number, response in enumerate(stream):
                if number == 0:
                    server.terminate()
                time.sleep(SLOW_READER_S)
                ended += bool(grpc_wire.read_stream_response(response, started=True).finish_reason)
                if ended == requests:
                    break
        finally:
            closed.set()
        assert ended == requests
        assert server.wait() == 0
