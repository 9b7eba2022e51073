"""Raw clients of the four endpoints with one response: /generate, /infer in JSON and in binary, gRPC.

They take the contract's inputs as plain Python values and return an Answer or a Refusal, without checks, defaults or
retries. Lists of lists are several rows.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from server.servers import ROOT
from triton_local.server import LocalTriton

TIMEOUT_S = 120.0
BAD = "bad request"
SECRET = "cuda:0 is on fire at 10.0.0.1"
"""Message of an injected exception: it belongs in the log, never in an answer."""

DTYPES = {
    "text_input": "BYTES",
    "max_tokens": "INT32",
    "min_tokens": "INT32",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "repetition_penalty": "FP32",
    "frequency_penalty": "FP32",
    "presence_penalty": "FP32",
    "seed": "UINT64",
    "stop_words": "BYTES",
    "bad_words": "BYTES",
    "stream": "BOOL",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
OUTPUTS = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")

Inputs = Mapping[str, object]
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Answer:
    """One row's outputs."""

    text: str
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class Refusal:
    """An error. kind: BAD for HTTP 400 and gRPC INVALID_ARGUMENT, else the status."""

    kind: str
    message: str


class Wire(Protocol):
    """A client of one endpoint."""

    def __call__(self, server: LocalTriton, inputs: Inputs) -> list[Answer] | Refusal: ...


def post(url: str, body: bytes) -> tuple[int, bytes]:
    """POST bytes as JSON; return the status, 4xx and 5xx included, and the body."""
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def generate_url(server: LocalTriton) -> str:
    """Return the address of /generate."""
    return f"http://{server.http_url}/v2/models/llama/generate"


def infer_url(server: LocalTriton) -> str:
    """Return the address of /infer."""
    return f"http://{server.http_url}/v2/models/llama/infer"


def generate(server: LocalTriton, inputs: Inputs) -> list[Answer] | Refusal:
    """Ask /generate: an input is a JSON key, and a request one row."""
    status, body = post(generate_url(server), json.dumps(inputs).encode())
    answer = json.loads(body)
    return _refusal(status, answer) or [
        Answer(answer["text_output"], *(answer[name] for name in OUTPUTS[1:]))
    ]  # fmt: skip


def infer_json(server: LocalTriton, inputs: Inputs) -> list[Answer] | Refusal:
    """Ask /infer with tensors written as JSON lists."""
    tensors = []
    for name, value in inputs.items():
        rows = as_rows(value)
        data = [item for row in rows for item in row]
        tensors.append({"name": name, "shape": [len(rows), len(rows[0])], "datatype": DTYPES[name], "data": data})
    status, body = post(infer_url(server), json.dumps({"inputs": tensors}).encode())
    answer = json.loads(body)
    if refusal := _refusal(status, answer):
        return refusal
    outputs = {output["name"]: output["data"] for output in answer["outputs"]}
    return [Answer(*row) for row in zip(*(outputs[name] for name in OUTPUTS), strict=True)]


def infer_binary(server: LocalTriton, inputs: Inputs) -> list[Answer] | Refusal:
    """Ask /infer with tritonclient: tensors are bytes behind the JSON."""
    with tritonclient.http.InferenceServerClient(server.http_url, network_timeout=TIMEOUT_S) as client:
        tensors = [fill(tritonclient.http.InferInput, name, value) for name, value in inputs.items()]
        try:
            return answers(client.infer("llama", tensors))
        except tritonclient.utils.InferenceServerException as error:
            return Refusal(BAD if error.status() == "400" else str(error.status()), str(error.message()))


def grpc(server: LocalTriton, inputs: Inputs) -> list[Answer] | Refusal:
    """Ask over gRPC with tritonclient."""
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        tensors = [fill(tritonclient.grpc.InferInput, name, value) for name, value in inputs.items()]
        try:
            return answers(client.infer("llama", tensors, client_timeout=TIMEOUT_S))
        except tritonclient.utils.InferenceServerException as error:
            kind = BAD if error.status() == "StatusCode.INVALID_ARGUMENT" else str(error.status())
            return Refusal(kind, str(error.message()))


WIRES: tuple[Wire, ...] = (generate, infer_json, infer_binary, grpc)
TENSOR_WIRES: tuple[Wire, ...] = (infer_json, infer_binary, grpc)
BINARY_WIRES: tuple[Wire, ...] = (infer_binary, grpc)


def ask(server: LocalTriton, wire: Wire = grpc, /, **inputs: object) -> Answer:
    """Return the answer to a request of one row; a refusal fails the test."""
    answers = wire(server, inputs)
    assert not isinstance(answers, Refusal), answers
    (answer,) = answers
    return answer


def as_rows(value: object) -> list[list[object]]:
    """Return a tensor of [rows, n] as lists: a plain value is one row of one, a list is one row, lists are rows."""
    if not isinstance(value, list):
        return [[value]]
    return value if value and isinstance(value[0], list) else [value]


def tensor(name: str, value: object) -> NDArray[Any]:
    """Return a value as an array of the contract's dtype; an array is returned unchanged."""
    if isinstance(value, np.ndarray):
        return value
    dtype = tritonclient.utils.triton_to_np_dtype(DTYPES[name])
    rows = as_rows(value)
    if dtype == np.object_:
        rows = [[item.encode() if isinstance(item, str) else item for item in row] for row in rows]
    return np.array(rows, dtype=dtype)


def fill(kind: Any, name: str, value: object) -> Any:  # noqa: ANN401 - tritonclient's two InferInput share no base
    """Return a value as one of tritonclient's input tensors."""
    array = tensor(name, value)
    item = kind(name, list(array.shape), tritonclient.utils.np_to_triton_dtype(array.dtype))
    item.set_data_from_numpy(array)
    return item


def answers(result: tritonclient.http.InferResult | tritonclient.grpc.InferResult) -> list[Answer]:
    """Return the rows of a response."""
    columns = [result.as_numpy(name) for name in OUTPUTS]
    assert all(column.ndim == 2 and column.shape[1] == 1 for column in columns)
    text, reason, taken, given = ([row[0] for row in column] for column in columns)
    return [
        Answer(text[row].decode(), reason[row].decode(), int(taken[row]), int(given[row])) for row in range(len(text))
    ]


def _refusal(status: int, answer: Mapping[str, Any]) -> Refusal | None:
    return None if status == 200 else Refusal(BAD if status == 400 else str(status), answer["error"])


def at_once(jobs: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """Run each job in a thread of its own, started together; return the results in order."""
    gate = threading.Barrier(len(jobs))

    def run(job: Callable[[], _Result]) -> _Result:
        gate.wait(timeout=60)
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(run, jobs))


def everywhere(server: LocalTriton, **inputs: object) -> Answer:
    """Send the same request to all four endpoints at once; return the answer, which must be the same."""
    answers = at_once([partial(ask, server, wire, **inputs) for wire in WIRES])
    assert answers == [answers[0]] * len(WIRES), answers
    return answers[0]


def assert_clean(message: str) -> None:
    """Check that an error message is one line and shows nothing of the server's inside."""
    for inside in ("Traceback", ".py", "site-packages", str(ROOT), "line ", SECRET, "\n"):
        assert inside not in message, message
    assert len(message) < 1000
