"""The example proxy forwards what clients may send, refuses the rest with the documented status, and limits rates."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import grpc
import pytest
from compose.commands import run
from compose.proxied import PROXY_PORT, REQUESTS_A_MINUTE, Connection, Proxied, readme_block
from tritonclient.grpc import service_pb2

GENERATE = "/v2/models/llama/generate"
GRPC = "/inference.GRPCInferenceService"
# Triton 2.51 reads a body of this type onto its stack, and a large one kills it.
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
TOO_LONG = bytes(600_000)
NESTED = b'{"text_input": %s%s}' % (b"[" * 260_000, b"]" * 260_000)
SHORT = json.dumps({"text_input": "A dictionary is", "max_tokens": 10}).encode().ljust(100_000)
CHUNK_BYTES = 8192
CLASSES = service_pb2.ModelInferRequest(model_name="llama")
"""What ends Triton 2.51 over gRPC, behind 400,000 bytes of an input."""
CLASSES.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(bytes(400_000))
CLASSES.outputs.add(name="text_output").parameters["classification"].int64_param = 1
GREEDY_CONNECTIONS = 8
MAX_GREEDY_REQUESTS = 5 * REQUESTS_A_MINUTE
"""Over each connection, so that the test ends."""


@pytest.fixture
def connection(proxied: Proxied) -> Iterator[Connection]:
    with closing(Connection(proxied, proxied.authorization("steady"))) as connection:
        yield connection


def test_paths_that_are_not_for_clients_are_forbidden(connection: Connection) -> None:
    """tests/contract/test_proxy_agrees.py has more of them."""
    paths = ("/v2/repository/index", "/v2/logging", "/v2/models/llama/infer", "/v2/models/llama/versions/1/infer")
    assert [connection.get(path) for path in paths] == [403] * 4


def test_a_request_without_a_valid_key_is_unauthorized(proxied: Proxied) -> None:
    for headers in ({}, proxied.authorization("unknown")):
        with closing(Connection(proxied, headers)) as connection:
            assert connection.get("/v2/health/ready") == 401


def test_a_body_that_declares_too_great_a_length_is_refused_unsent(connection: Connection) -> None:
    assert connection.post(GENERATE, {"Content-Length": str(len(TOO_LONG))}) == 413


@pytest.mark.parametrize(
    ("path", "headers", "body", "status"),
    [
        pytest.param(GENERATE, FORM, SHORT, 200, id="short"),
        # Triton 2.51 throws at this header and ends, and the parser's stack overflows at this body.
        pytest.param(GENERATE, {"Accept-Encoding": "gzip;q=1e999"}, SHORT, 200, id="impossible quality"),
        pytest.param(GENERATE, {}, NESTED, 400, id="nested"),
        pytest.param(GENERATE, FORM, TOO_LONG, 413, id="too long"),
        pytest.param(GENERATE, {**FORM, "X-0": "x" * 4096}, TOO_LONG, 413, id="too long, with a head"),
        pytest.param(
            GENERATE, {**FORM, **{f"X-{n}": "x" * 4096 for n in range(4)}}, TOO_LONG, 431, id="head fills the buffer"
        ),
        pytest.param(GENERATE, {"Content-Encoding": "gzip"}, bytes(1000), 415, id="compressed"),
        pytest.param(GENERATE, {"Content-Type": "application/grpc"}, TOO_LONG, 415, id="HTTP path as gRPC"),
        pytest.param(f"{GRPC}/ModelInfer", FORM, TOO_LONG, 415, id="gRPC path as a form"),
        pytest.param(f"{GRPC}/ModelStreamInfer", FORM, TOO_LONG, 403, id="gRPC stream as a form"),
    ],
)
def test_a_chunked_body_gets_the_status_of_its_size_and_type(
    connection: Connection, path: str, headers: Mapping[str, str], body: bytes, status: int
) -> None:
    chunks = (body[start : start + CHUNK_BYTES] for start in range(0, len(body), CHUNK_BYTES))
    assert connection.post(path, {**headers, "Transfer-Encoding": "chunked"}, chunks) == status


@pytest.mark.parametrize(
    ("method", "message", "compression", "status"),
    [
        ("ModelInfer", TOO_LONG, grpc.Compression.NoCompression, "413"),
        ("ModelInfer", TOO_LONG, grpc.Compression.Gzip, "415"),
        ("ModelInfer", CLASSES.SerializeToString(), grpc.Compression.NoCompression, "403"),
        ("ModelStreamInfer", b"", grpc.Compression.NoCompression, "403"),
    ],
    ids=["too long", "compressed", "a text's classes", "stream"],
)
def test_grpc_has_the_same_limits(
    proxied: Proxied, method: str, message: bytes, compression: grpc.Compression, status: str
) -> None:
    credentials = grpc.ssl_channel_credentials(proxied.certificate.read_bytes())
    metadata = [(name.lower(), value) for name, value in proxied.authorization("steady").items()]
    with grpc.secure_channel(proxied.address, credentials) as channel:
        # On the wire a stream of one message equals a unary call.
        call = channel.unary_unary(f"{GRPC}/{method}")
        with pytest.raises(grpc.RpcError) as refused:
            call(message, timeout=60, metadata=metadata, compression=compression)
    assert status in refused.value.details()


def test_an_http2_body_of_undeclared_length_is_refused(proxied: Proxied) -> None:
    # curl declares no length for what it reads from stdin.
    authorization = f"Authorization: {proxied.authorization('steady')['Authorization']}"
    curl = ["curl", "-sS", "--http2", "--cacert", str(proxied.certificate), "-H", authorization, "-X", "POST"]
    url = f"https://{proxied.address}{GENERATE}"
    sent = run(["bash", "-c", 'echo "{}" | "$@"', "curl", *curl, "-T", "-", "-w", "%{http_code}", url], timeout=60)
    assert sent.stdout.endswith("411")


def test_the_readmes_request_returns_a_text(proxied: Proxied) -> None:
    command = readme_block("curl --cacert")
    command = command[command.index("curl") :].replace(f"localhost:{PROXY_PORT}", proxied.address)
    environment = {"gate": str(proxied.certificate.parent), "key": proxied.keys["steady"], "PATH": os.environ["PATH"]}
    assert "text_output" in run(["bash", "-c", command], timeout=120, environment=environment).stdout


def test_a_client_above_its_rate_gets_429(proxied: Proxied) -> None:
    def send() -> Counter[int]:
        statuses: Counter[int] = Counter()
        with closing(Connection(proxied, proxied.authorization("greedy"))) as connection:
            while not statuses[429] and statuses.total() < MAX_GREEDY_REQUESTS:
                # A path that is never forwarded.
                statuses[connection.get("/greedy")] += 1
        return statuses

    # On several connections, because the limit counts requests within a minute.
    with ThreadPoolExecutor(GREEDY_CONNECTIONS) as pool:
        sent = [pool.submit(send) for _ in range(GREEDY_CONNECTIONS)]
    statuses = sum((future.result() for future in sent), Counter[int]())
    assert set(statuses) == {403, 429}
    assert statuses[403] >= REQUESTS_A_MINUTE
