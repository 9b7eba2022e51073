"""What responses need of Triton's Python backend, which exists only inside Triton: tensors, responses and a sender.

And the reader of requests over these, which imports them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
from engine.configs import read_config
from engine.scheduling import SECONDS
from llama_engine.engine.dispatcher import ResponseDispatcher
from llama_engine.engine.engine import Engine
from llama_engine.observability.log import RequestLog
from llama_engine.observability.stats import Stats
from llama_engine.request.adapter_choice import AdapterCommand
from llama_engine.request.parser import RequestParser
from llama_engine.triton.config import QueuePolicy
from numpy.typing import NDArray

FINAL = 1

OUTPUTS = [output.name for output in read_config("streaming").output]


@dataclass
class Tensor:
    """A tensor."""

    given_name: str
    array: NDArray[Any]

    def name(self) -> str:
        return self.given_name

    def as_numpy(self) -> NDArray[Any]:
        return self.array


@dataclass
class Response:
    """A response: outputs, or an error."""

    output_tensors: list[Tensor] = field(default_factory=list)
    error: Exception | None = None

    def values(self) -> dict[str, list[Any]]:
        """The outputs by name, strings as str."""
        return {
            tensor.given_name: [
                value.decode() if isinstance(value, bytes) else value for value in tensor.array.tolist()
            ]
            for tensor in self.output_tensors
        }


class TritonError(Exception):
    """An error and its code."""

    CANCELLED, INTERNAL, INVALID_ARG, UNAVAILABLE = range(4)

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Request:
    """A request, its response sender, and what was sent: responses and whether each was the final one.

    requested: the outputs that the client requests; all, where it names none.
    """

    def __init__(self, parameters: str = "", /, **inputs: NDArray[Any]) -> None:
        self._parameters = parameters
        self._inputs = [Tensor(name, array) for name, array in inputs.items()]
        self.sent: list[tuple[Response, bool]] = []
        self.requested = list(OUTPUTS)

    def requested_output_names(self) -> list[str]:
        return self.requested

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def parameters(self) -> str:
        return self._parameters

    def request_id(self) -> str:
        return "one"

    def timeout(self) -> int:
        return 0

    def get_response_sender(self) -> Request:
        return self

    def is_cancelled(self) -> bool:
        return False

    def send(self, response: Response, flags: int = 0) -> None:
        assert not any(final for _, final in self.sent), "a response follows the final one"
        assert {tensor.given_name for tensor in response.output_tensors} <= {*self.requested}, "Triton would drop some"
        self.sent.append((response, bool(flags & FINAL)))


def text(*rows: str) -> NDArray[Any]:
    """Return rows of one string."""
    return np.array([[row.encode()] for row in rows], dtype=np.object_)


def install() -> None:
    """Stand in for the module; done below, before what imports it."""
    module = ModuleType("triton_python_backend_utils")
    module.__dict__.update(
        Tensor=Tensor,
        InferenceRequest=Request,
        InferenceResponse=Response,
        InferenceResponseSender=Request,
        TritonError=TritonError,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    )
    sys.modules.setdefault("triton_python_backend_utils", module)


install()

from llama_engine.triton.outputs import release_tensors  # noqa: E402 - as above
from llama_engine.triton.request_reader import RequestReader  # noqa: E402 - imports what is installed above
from llama_engine.triton.responder import Responder  # noqa: E402 - as above


def _no_command(command: AdapterCommand, response: object) -> None:
    raise AssertionError(f"{command} is for tests of AdapterCommands")


def request_reader(
    engine: Engine,
    parser: RequestParser,
    log_level: str,
    stats: Stats,
    dispatcher: ResponseDispatcher,
    add_command: Callable[[AdapterCommand, Responder], None] = _no_command,
) -> RequestReader:
    """Return a reader of in-flight, decoupled requests."""
    return RequestReader(
        engine=engine,
        parser=parser,
        queue_policy=QueuePolicy(),
        decoupled=True,
        inflight=True,
        log=RequestLog(log_level),
        stats=stats,
        dispatcher=dispatcher,
        add_command=add_command,
    )


@contextmanager
def reading(engine: Engine, stats: Stats, log_level: str) -> Iterator[RequestReader]:
    """A reader of an engine's requests whose responses are sent at the latest at the end."""
    dispatcher = ResponseDispatcher()
    parser = RequestParser(engine.tokenizer, engine.defaults, engine.max_model_len)
    try:
        yield request_reader(engine, parser, log_level, stats, dispatcher)
    finally:
        assert dispatcher.close(SECONDS)
        stats.close(SECONDS)
        release_tensors()
