"""Triton's requests, decoded to sequences or refused."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

import triton_python_backend_utils as pb_utils

from llama_engine.api.request_parser import RequestParser
from llama_engine.engine import Engine
from llama_engine.errors import GenerationError, InvalidRequest, RequestError
from llama_engine.observability.log import RequestLog
from llama_engine.observability.stats import Stats
from llama_engine.response_dispatcher import ResponseDispatcher
from llama_engine.sequence import RequestContext, Sequence
from llama_engine.triton.config import QueuePolicy
from llama_engine.triton.response import Response

IGNORED_PARAMETERS = frozenset({"id"})
"""The id of a request to /generate arrives as a request parameter."""

FORWARDED = "llama_unary"
"""Request parameter of a request that another model passes on (llama_unary, vllm_model): JSON of [the client's
parameters, whether a stream may answer]. A client that sends it itself gains nothing."""

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
        name = self.log.name(_request_id(request))
        response = Response(request, self.log, name, self.engine.tokenizer, self.dispatcher if self.inflight else None)
        try:
            response.add(self._sequences(request, response))
        except InvalidRequest as error:
            self._refuse(response, error)
        except Exception:  # noqa: BLE001 - Triton would fail the whole batch, and show the client a traceback
            _log.exception("request %s could not be read; its client gets an error", response.name)
            self._refuse(response, GenerationError("the request could not be read; the server's log has the reason"))
        return response

    def _sequences(self, request: pb_utils.InferenceRequest, response: Response) -> list[Sequence]:
        # A misspelled input of /generate arrives as a parameter, and is refused as one.
        parameters = _parameters(request)
        streams = True
        if (forwarded := _forwarded(parameters)) is not None:
            parameters, streams = forwarded
            response.names_codes = True
        deadline = self.queue_policy.deadline(request.timeout())
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        rows = self.parser.parse(
            inputs, {name: value for name, value in parameters.items() if name not in IGNORED_PARAMETERS}
        )
        stream = any(row.stream for row in rows)
        if stream and not (streams and self.decoupled):
            model = "this config" if streams else "llama_unary"
            raise InvalidRequest(f"stream is true; it must be false: {model} answers in one response")
        if stream and len(rows) > 1:
            raise InvalidRequest(f"stream is true for {len(rows)} rows; it must be false, or the request one row")
        response.stream = stream
        context = RequestContext(response, response.name, stream, deadline)
        return [sequence for row in rows for sequence in self.engine.builder.choices(row, context)]

    def _refuse(self, response: Response, error: RequestError) -> None:
        # The frames of an error's traceback refer to the request, and the response to the error: such a cycle may last
        # until the interpreter's end, where a request ends the process with signal 11.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        response.error = error
        self.stats.record_refused(error)
        self.dispatcher.post([(response, error)])


def _parameters(request: pb_utils.InferenceRequest) -> dict[str, object]:
    """Return a request's parameters by name. Raises InvalidRequest where they aren't UTF-8."""
    try:
        parameters: dict[str, object] = json.loads(request.parameters() or "{}")
    except ValueError as error:
        # Triton passes on whatever bytes were sent.
        raise InvalidRequest("the request has parameters that are not UTF-8") from error
    return parameters


def _forwarded(parameters: dict[str, object]) -> tuple[dict[str, object], bool] | None:
    """Return what FORWARDED says; None without it, and where it is malformed."""
    try:
        values, streams = json.loads(str(parameters[FORWARDED]))
    except (KeyError, ValueError, TypeError, RecursionError):
        return None
    return (values, streams) if isinstance(values, dict) and isinstance(streams, bool) else None


def _request_id(request: pb_utils.InferenceRequest) -> str:
    """Return the client's id of a request, empty without one."""
    try:
        return request.request_id()
    except UnicodeDecodeError:
        # Over HTTP it may be any bytes; bytes that aren't text are no id.
        return ""
