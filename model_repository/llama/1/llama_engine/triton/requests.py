"""A request on Triton's side: decoded to sequences, or refused; and its response, encoded and sent.

Chunks and results reach a response through the dispatcher; a response sender, or `execute`, passes it to the client.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import triton_python_backend_utils as pb_utils

from llama_engine.api.request_parser import RequestParser
from llama_engine.engine import Engine
from llama_engine.errors import Cancelled, GenerationError, InvalidRequest, RequestError, Unavailable
from llama_engine.observability.log import RequestLog
from llama_engine.observability.stats import Stats
from llama_engine.response_dispatcher import ResponseDispatcher
from llama_engine.sequence import Chunk, Completion, Event, Sequence
from llama_engine.triton.config import QueuePolicy

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


class Response:
    """The response to one request: the sink of its sequences, with Triton at its other end."""

    def __init__(self, request: pb_utils.InferenceRequest, log: RequestLog, name: str, sends: bool) -> None:
        """name: of the request in the log. sends: through a response sender; otherwise `execute` returns `build`."""
        self.name = name
        self._log = log
        self._sender = request.get_response_sender() if sends else None
        # The request with its tensors is kept only where there is no sender to ask.
        self._cancellable: pb_utils.InferenceResponseSender | pb_utils.InferenceRequest | None = self._sender or request
        self._complete = False
        # Triton crashes when it is asked about a request whose final response is sent, or just being sent.
        self._sending = threading.Lock()
        self.stream = False
        self.sequences: list[Sequence] = []
        self.error: RequestError | None = None
        """Replaces the sequences' results: the request was refused, or its response could not be sent."""

    def send(self, events: list[Event]) -> None:
        """Send a stream's chunks as they come, and any other response once all sequences have finished."""
        if self._sender is None or self._complete:
            return
        try:
            self._send_events(self._sender, events)
        except Exception:  # noqa: BLE001 - a text with a hole must not look complete, and silence is no response
            _log.exception("the response to request %s could not be sent; its client gets an error", self.name)
            self.error = GenerationError("the answer could not be sent; the server's log has the reason")
            self._send(self._sender, _error(self.error), final=True)
        finally:
            if self._complete:
                self._end()

    def build(self) -> pb_utils.InferenceResponse:
        """Return the response of a request whose sequences have all finished, for Triton to send."""
        with self._sending:
            self._complete = True
        response = self._encode()
        self._end()
        return response

    def is_cancelled(self) -> bool:
        """Ask Triton whether the client has cancelled the request."""
        with self._sending:
            return not self._complete and self._cancellable is not None and self._cancellable.is_cancelled()

    def _end(self) -> None:
        """Log the answered request, and drop what it refers to."""
        self._log.record(self.name, self.sequences, self.stream, self.error)
        # Each sequence refers to its sink: without the cycle both are freed at once.
        self.sequences = []
        # A request and its sender that are destroyed with the interpreter end the process with signal 11, and the
        # engine still refers to the sequences of its last step.
        self._sender = self._cancellable = None

    def _encode(self) -> pb_utils.InferenceResponse:
        results = [sequence.result for sequence in self.sequences]
        errors = [result for result in (self.error, *results) if isinstance(result, RequestError)]
        if errors:
            return _error(errors[0])
        completions = [result for result in results if isinstance(result, Completion)]
        return _tensors(
            [completion.text for completion in completions],
            [completion.finish_reason for completion in completions],
            [completion.num_input_tokens for completion in completions],
            [completion.num_output_tokens for completion in completions],
        )

    def _send_events(self, sender: pb_utils.InferenceResponseSender, events: list[Event]) -> None:
        if not self.stream:
            if all(sequence.result is not None for sequence in self.sequences):
                self._send(sender, self._encode(), final=True)
            return
        last = events[-1]
        chunks = [event for event in events if isinstance(event, Chunk)]
        if not isinstance(last, RequestError):
            self._send(sender, self._chunk(chunks, last), final=isinstance(last, Completion))
            return
        if chunks:
            self._send(sender, self._chunk(chunks, chunks[-1]), final=False)
        self._send(sender, _error(last), final=True)

    def _chunk(self, chunks: list[Chunk], last: Chunk | Completion) -> pb_utils.InferenceResponse:
        """Join the chunks that accumulated; the finish reason comes with the last one of the sequence."""
        return pb_utils.InferenceResponse(
            [
                _strings("text_output", ["".join(chunk.text for chunk in chunks)]),
                _reason(last.finish_reason if isinstance(last, Completion) else ""),
                _count("num_input_tokens", self.sequences[0].num_prompt_tokens),
                _count("num_output_tokens", sum(chunk.num_tokens for chunk in chunks)),
            ]
        )

    def _send(
        self, sender: pb_utils.InferenceResponseSender, response: pb_utils.InferenceResponse, final: bool
    ) -> None:
        with self._sending:
            # First: nothing may follow a final flag, not even after a failure to send it.
            self._complete = final
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)


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


def _error(error: RequestError) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), _code(error)))


def _code(error: RequestError) -> int:
    if isinstance(error, InvalidRequest):
        return pb_utils.TritonError.INVALID_ARG
    if isinstance(error, Cancelled):
        return pb_utils.TritonError.CANCELLED
    return pb_utils.TritonError.UNAVAILABLE if isinstance(error, Unavailable) else pb_utils.TritonError.INTERNAL


def _tensors(
    texts: list[str], finish_reasons: list[str], num_input_tokens: list[int], num_output_tokens: list[int]
) -> pb_utils.InferenceResponse:
    """Build a response of one row per list element."""
    return pb_utils.InferenceResponse(
        [
            _strings("text_output", texts),
            _strings("finish_reason", finish_reasons),
            _counts("num_input_tokens", num_input_tokens),
            _counts("num_output_tokens", num_output_tokens),
        ]
    )


# A tensor that is sent again is written to shared memory once. The dispatcher's thread uses these, and `finalize` once
# that has ended.
@lru_cache(maxsize=256)
def _count(name: str, value: int) -> pb_utils.Tensor:
    return _counts(name, [value])


@lru_cache
def _reason(value: str) -> pb_utils.Tensor:
    return _strings("finish_reason", [value])


def release_tensors() -> None:
    """Drop the tensors that are kept to be sent again: they must not outlive Triton's shared memory."""
    _count.cache_clear()
    _reason.cache_clear()


def _strings(name: str, values: list[str]) -> pb_utils.Tensor:
    return pb_utils.Tensor(name, np.array([[value.encode()] for value in values], dtype=np.object_))


def _counts(name: str, values: list[int]) -> pb_utils.Tensor:
    return pb_utils.Tensor(name, np.array(values, dtype=np.int32).reshape(-1, 1))
