"""Requests: from Triton's tensors and parameters to sequences, or to the error that the client gets."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

import triton_python_backend_utils as pb_utils

from llama_engine.api.request_parser import RequestParser
from llama_engine.engine import Engine
from llama_engine.errors import GenerationError, InvalidRequest, RequestError
from llama_engine.observability.request_log import RequestLog
from llama_engine.observability.stats import Stats
from llama_engine.response_dispatcher import ResponseDispatcher
from llama_engine.sequence import Sequence
from llama_engine.triton.config import QueuePolicy
from llama_engine.triton.responses import Response

COMPATIBILITY_INPUTS = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
"""Inputs of other Triton LLM backends: accepted, and without effect, because those outputs are always there."""

HARMLESS_PARAMETERS = frozenset({"id"})
"""Request parameters that are ignored: the id of a request to /generate arrives as one."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequestDecoder:
    """Decodes the requests of one instance. inflight: responses go through response senders."""

    engine: Engine
    parser: RequestParser
    queue_policy: QueuePolicy
    decoupled: bool
    inflight: bool
    log: RequestLog
    stats: Stats
    dispatcher: ResponseDispatcher

    def decode(self, request: pb_utils.InferenceRequest) -> Response:
        """Return the request's response, with one sequence per row, or with its error if the request is invalid."""
        response = Response(request, self.log, self.log.name(_request_id(request)), sends=self.inflight)
        try:
            response.sequences = self._sequences(request, response)
        except InvalidRequest as error:
            self._refuse(response, error)
        except Exception:  # noqa: BLE001 - Triton would fail the whole batch, and show the client a traceback
            _log.exception("request %s could not be read; its client gets an error", response.name)
            self._refuse(response, GenerationError("the request could not be read; the server's log has the reason"))
        return response

    def _sequences(self, request: pb_utils.InferenceRequest, response: Response) -> list[Sequence]:
        deadline = self.queue_policy.deadline(request.timeout())
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        unknown = sorted(_parameter_names(request) - HARMLESS_PARAMETERS)
        if unknown:
            # A misspelled input arrives as a parameter; ignoring it would be a silent default.
            raise InvalidRequest(f"{unknown[0]} is no input of this model, and it takes no request parameters")
        for name in COMPATIBILITY_INPUTS:
            inputs.pop(name, None)
        stream = "stream" in inputs and bool(inputs.pop("stream").any())
        if stream and not self.decoupled:
            raise InvalidRequest("stream is true; it must be false: this config answers in one response")
        rows = self.parser.parse(inputs)
        if stream and len(rows) > 1:
            raise InvalidRequest(f"stream is true for {len(rows)} rows; it must be false, or the request one row")
        response.stream = stream
        return [self.engine.sequence(row, response.name, response, stream, deadline) for row in rows]

    def _refuse(self, response: Response, error: RequestError) -> None:
        response.error = error
        self.stats.record_refused(error)
        self.dispatcher.post([(response, error)])


def _parameter_names(request: pb_utils.InferenceRequest) -> set[str]:
    """Return the names of a request's parameters. Raises InvalidRequest where they aren't UTF-8."""
    try:
        return set(json.loads(request.parameters() or "{}"))
    except ValueError as error:
        # Triton passes on whatever bytes were sent.
        raise InvalidRequest("the request has parameters that are not UTF-8, and it takes none") from error


def _request_id(request: pb_utils.InferenceRequest) -> str:
    """Return the client's id of a request, empty without one."""
    try:
        return request.request_id()
    except UnicodeDecodeError:
        # Over HTTP it may be any bytes; bytes that aren't text are no id.
        return ""
