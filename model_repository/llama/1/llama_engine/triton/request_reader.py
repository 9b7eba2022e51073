"""Reads Triton's requests into sequences, or refuses them with an error response."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import triton_python_backend_utils as pb_utils

from llama_engine.engine.dispatcher import ResponseDispatcher
from llama_engine.engine.engine import Engine
from llama_engine.engine.events import RequestContext
from llama_engine.errors import GenerationError, InvalidRequest, RequestError
from llama_engine.observability.log import RequestLog
from llama_engine.observability.stats import Stats
from llama_engine.request.adapter_choice import AdapterCommand, parse_command
from llama_engine.request.parameters import DESCRIPTION, LORA_PATH, PROMPTS
from llama_engine.request.parser import RequestParser
from llama_engine.triton.config import QueuePolicy
from llama_engine.triton.responder import Responder

if TYPE_CHECKING:
    from llama_engine.observability.traces import Traces

TRACEPARENT = "traceparent"
"""Request parameter with the caller's span, in W3C's form."""

IGNORED_PARAMETERS = frozenset({"id", TRACEPARENT})
"""Request parameters that are not inputs: Triton passes the id of a request to /generate as a parameter."""

FORWARDED_PARAMETERS = "llama_unary"
"""Request parameter that marks a request forwarded by another model (llama_unary, vllm_model). Its value is JSON:
[the client's request parameters, whether a stream is allowed]. A client gains no privileges by sending it."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RequestReader:
    """Reads the requests of one instance.

    inflight: whether responses are sent by response senders. add_command: see `AdapterCommands.add`.
    """

    engine: Engine
    parser: RequestParser
    queue_policy: QueuePolicy
    decoupled: bool
    inflight: bool
    log: RequestLog
    stats: Stats
    dispatcher: ResponseDispatcher
    add_command: Callable[[AdapterCommand, Responder], None]
    traces: Traces | None = None

    def read(self, request: pb_utils.InferenceRequest) -> Responder:
        """Return the request's responder: with its sequences, a text, its command's answer to come, or an error."""
        name, dispatcher = self.log.name(_request_id(request)), self.dispatcher if self.inflight else None
        responder = Responder(request, self.log, name, self.engine.tokenizer, dispatcher)
        try:
            self._fill(request, responder)
        except RequestError as error:
            self._refuse(responder, error)
        except Exception:  # noqa: BLE001 - Triton would fail the whole batch and send the clients a traceback
            _log.exception("request %s could not be read; its client gets an error", responder.name)
            self._refuse(responder, GenerationError("the request could not be read; the server's log has the reason"))
        return responder

    def _fill(self, request: pb_utils.InferenceRequest, responder: Responder) -> None:
        """Add the request's sequences to the responder, or the description that it asks for; or add its command."""
        # The parser refuses unknown parameters: a misspelled input of /generate arrives as one.
        parameters = _parameters(request)
        streams = True
        if (forwarded := _forwarded(parameters)) is not None:
            parameters, streams = forwarded
        if self.traces is not None and TRACEPARENT in parameters:
            responder.trace = partial(self.traces.record, str(parameters[TRACEPARENT]))
        values = {name: value for name, value in parameters.items() if name not in IGNORED_PARAMETERS}
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        has_prompt = any(prompt in inputs for prompt in PROMPTS)
        if DESCRIPTION in inputs and not has_prompt:
            digest = self.parser.parse_digest(inputs, values)
            responder.text = self.engine.description.reply(digest, self.engine.adapters.loaded())
            self.dispatcher.wake(responder)
            return
        if LORA_PATH in inputs and not has_prompt:
            if not self.inflight:
                raise InvalidRequest(f"{LORA_PATH} is given; it must be missing under scheduling 'batch'")
            self.add_command(parse_command(inputs, values), responder)
            return
        deadline = self.queue_policy.deadline(request.timeout())
        requests = self.parser.parse(inputs, values)
        stream = any(request.stream for request in requests)
        if stream and not (streams and self.decoupled):
            model = "this config" if streams else "llama_unary"
            raise InvalidRequest(f"stream is true; it must be false: {model} answers in one response")
        if stream and len(requests) > 1:
            raise InvalidRequest(f"stream is true in a batch of {len(requests)}; it must be false, or the batch size 1")
        responder.stream = stream
        context = RequestContext(responder, responder.name, stream, deadline)
        choices = self.engine.builder.choices
        responder.add([sequence for request in requests for sequence in choices(request, context)])

    def _refuse(self, responder: Responder, error: RequestError) -> None:
        responder.refuse(error)
        self.stats.record_refused(error)
        self.dispatcher.post([(responder, error)])


def _parameters(request: pb_utils.InferenceRequest) -> dict[str, object]:
    """Return a request's parameters by name. Raises InvalidRequest if they are not UTF-8."""
    try:
        parameters: dict[str, object] = json.loads(request.parameters() or "{}")
    except ValueError as error:
        # Triton doesn't validate the encoding.
        raise InvalidRequest("the request has parameters that are not UTF-8") from error
    return parameters


def _forwarded(parameters: dict[str, object]) -> tuple[dict[str, object], bool] | None:
    """Return the client's parameters and whether a stream is allowed, from FORWARDED_PARAMETERS; None if not forwarded.

    A malformed value also returns None, and the parser then refuses the unknown parameter.
    """
    try:
        values, streams = json.loads(str(parameters[FORWARDED_PARAMETERS]))
    except (KeyError, ValueError, TypeError, RecursionError):
        return None
    return (values, streams) if isinstance(values, dict) and isinstance(streams, bool) else None


def _request_id(request: pb_utils.InferenceRequest) -> str:
    """Return the request's id; empty if the client set none or if it is not UTF-8."""
    try:
        return request.request_id()
    except UnicodeDecodeError:
        # Triton accepts arbitrary bytes over HTTP.
        return ""
