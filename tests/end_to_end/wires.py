"""Raw clients of the three endpoints with one response: /generate, /infer, gRPC.

They take the contract's inputs as plain Python values and return an Answer or a Refusal, without checks, defaults or
retries. Lists of lists are several rows.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import httpx
import numpy as np
import tritonclient.grpc
import tritonclient.http
from end_to_end.servers import HTTP, ROOT, TIMEOUT_S
from llama_engine.request.parameters import NAMES, PARAMETERS
from numpy.typing import NDArray
from triton_local.server import LocalTriton

MODEL = "llama"
UNARY = "llama_unary"
"""Beside a streaming llama, for the endpoints with one response."""

BAD = "bad request"
SECRET = "cuda:0 is on fire at 10.0.0.1"
"""Message of an injected exception: it belongs in the log, never in an answer."""

DTYPES = {name: PARAMETERS[row].type.replace("STRING", "BYTES") for name, row in NAMES.items()}
OUTPUTS = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")

Inputs = Mapping[str, object]
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Answer:
    """One row's outputs, in the order of OUTPUTS."""

    text: str
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class Refusal:
    """An error. kind: BAD for HTTP 400 and gRPC INVALID_ARGUMENT, else the status."""

    kind: str
    message: str


Wire = Callable[[LocalTriton, Inputs], list[Answer] | Refusal]
"""A client of one endpoint."""


def model_url(server: LocalTriton, endpoint: str) -> str:
    """Return the address of an endpoint of the model."""
    return f"http://{server.http_address}/v2/models/llama/{endpoint}"


def post(server: LocalTriton, endpoint: str, body: object) -> httpx.Response:
    """POST to an endpoint of the model: bytes as they are, anything else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body)
    return HTTP.post(model_url(server, endpoint), content=content, headers={"Content-Type": "application/json"})


def generate(server: LocalTriton, inputs: Inputs) -> list[Answer] | Refusal:
    """Ask /generate: an input is a JSON key, and a request one row."""
    answered = post(server, "generate", inputs)
    return _refusal(answered) or [Answer(*(answered.json()[name] for name in OUTPUTS))]


def infer(server: LocalTriton, inputs: Inputs, request_id: str = "", model: str = MODEL) -> list[Answer] | Refusal:
    """Ask /infer with tritonclient; its tensors are bytes behind the JSON."""
    request = tensors(tritonclient.http.InferInput, inputs)
    outputs = [tritonclient.http.InferRequestedOutput(name) for name in OUTPUTS]
    with tritonclient.http.InferenceServerClient(server.http_address, network_timeout=TIMEOUT_S) as client:
        try:
            return answers(client.infer(model, request, request_id=request_id, outputs=outputs))
        except tritonclient.utils.InferenceServerException as error:
            return Refusal(BAD if error.status() == "400" else str(error.status()), str(error.message()))


def grpc(server: LocalTriton, inputs: Inputs, request_id: str = "", model: str = MODEL) -> list[Answer] | Refusal:
    """Ask over gRPC with tritonclient."""
    with tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
        request = tensors(tritonclient.grpc.InferInput, inputs)
        try:
            return answers(client.infer(model, request, request_id=request_id, client_timeout=TIMEOUT_S))
        except tritonclient.utils.InferenceServerException as error:
            kind = BAD if error.status() == "StatusCode.INVALID_ARGUMENT" else str(error.status())
            return Refusal(kind, str(error.message()))


unary_infer = partial(infer, model=UNARY)
unary_grpc = partial(grpc, model=UNARY)
WIRES: tuple[Wire, ...] = (generate, infer, grpc)
TENSOR_WIRES: tuple[Wire, ...] = (infer, grpc)
UNARY_WIRES: tuple[Wire, ...] = (unary_infer, unary_grpc)


def ask(server: LocalTriton, wire: Wire = grpc, /, **inputs: object) -> Answer:
    """Return the answer to a request of one row; a refusal fails the test."""
    answers = wire(server, inputs)
    assert not isinstance(answers, Refusal), answers
    (answer,) = answers
    return answer


def tensors(kind: Any, inputs: Inputs) -> list[Any]:  # noqa: ANN401 - tritonclient's two InferInput share no base
    """Return values as tritonclient's input tensors of the contract's dtypes; an array keeps its own.

    A plain value is one row of one, a list one row, lists of lists are rows.
    """
    filled = []
    for name, value in inputs.items():
        array = value if isinstance(value, np.ndarray) else _array(name, value)
        tensor = kind(name, list(array.shape), tritonclient.utils.np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        filled.append(tensor)
    return filled


def answers(result: tritonclient.http.InferResult | tritonclient.grpc.InferResult) -> list[Answer]:
    """Return the rows of a response."""
    columns = [result.as_numpy(name) for name in OUTPUTS]
    assert all(column.ndim == 1 for column in columns)
    return [
        Answer(_text(text), _text(reason), int(prompt_tokens), int(tokens))
        for text, reason, prompt_tokens, tokens in zip(*columns, strict=True)
    ]


def at_once(jobs: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """Run each job in a thread of its own, started together; return the results in order."""
    gate = threading.Barrier(len(jobs))

    def run(job: Callable[[], _Result]) -> _Result:
        gate.wait(timeout=60)
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(run, jobs))


def everywhere(server: LocalTriton, **inputs: object) -> Answer:
    """Send the same request to all three endpoints at once; return the answer, which must be the same."""
    answers = at_once([partial(ask, server, wire, **inputs) for wire in WIRES])
    assert answers == [answers[0]] * len(WIRES), answers
    return answers[0]


def assert_clean(message: str) -> None:
    """Check that an error message is one line and shows nothing of the server's inside."""
    for inside in ("Traceback", ".py", "site-packages", str(ROOT), "line ", SECRET, "\n"):
        assert inside not in message, message
    assert len(message) < 1000


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()


def _array(name: str, value: object) -> NDArray[Any]:
    row: list[Any] = value if isinstance(value, list) else [value]
    rows: list[list[Any]] = row if row and isinstance(row[0], list) else [row]
    if DTYPES[name] == "BYTES":
        rows = [[item.encode() if isinstance(item, str) else item for item in row] for row in rows]
    return np.array(rows, dtype=tritonclient.utils.triton_to_np_dtype(DTYPES[name]))


def _refusal(answered: httpx.Response) -> Refusal | None:
    if answered.status_code == 200:
        return None
    kind = BAD if answered.status_code == 400 else str(answered.status_code)
    return Refusal(kind, answered.json()["error"])
