"""The Triton side of the model: decode the requests, hand them to the scheduler, encode what comes back.

The only file that imports triton_python_backend_utils. What a request may hold is `llama_engine.api.request_parser`,
how it is generated `llama_engine.engine`'s, and when `llama_engine.scheduler`'s.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llama_engine.libraries  # noqa: F401 - before anything that imports transformers
import numpy as np
import triton_python_backend_utils as pb_utils
from llama_engine.api.request_parser import RequestParser
from llama_engine.delivery import Delivery, Part
from llama_engine.engine import Engine
from llama_engine.errors import (
    Cancelled,
    EngineError,
    GenerationError,
    InvalidRequest,
    InvalidSettings,
    RequestError,
    Unavailable,
)
from llama_engine.model.loader import choose_device, load_checkpoint
from llama_engine.observability.log_format import TextFormatter, write_json
from llama_engine.observability.metrics import Metric
from llama_engine.observability.readiness import Readiness
from llama_engine.observability.request_log import RequestLog
from llama_engine.observability.stats import Meter
from llama_engine.rows import Completion, Piece
from llama_engine.scheduler import Scheduler
from llama_engine.settings import Settings
from llama_engine.tickets import Ticket
from llama_engine.triton.logger import TritonLogHandler
from llama_engine.triton.metrics import TritonMetrics
from llama_engine.triton.model_config import gpu_of, instance_of, is_decoupled, own_parameters
from llama_engine.triton.queue_policy import QueuePolicy

COMPATIBILITY_INPUTS = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
"""Inputs of other Triton LLM backends: accepted, and without effect, because those outputs are always there."""

HARMLESS_PARAMETERS = frozenset({"id"})
"""Request parameters that may be ignored: the id of a request to /generate arrives as one."""

CLOSE_SECONDS = 10.0
"""How long, once the rows are answered, the answers and the last metrics may take to go out."""

_log = logging.getLogger("llama_engine.triton")


class TritonPythonModel:
    """One instance of the model, in a process of its own."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint, allocate the cache, and generate a token to prove that both work."""
        log = pb_utils.Logger
        host = TritonLogHandler(log.log_info, log.log_warn, log.log_error)
        host.setFormatter(TextFormatter())
        logging.getLogger("llama_engine").addHandler(host)
        logging.getLogger("llama_engine").setLevel(logging.INFO)
        try:
            # In a thread that ends, because on a CPU every thread that computes gets PyTorch's threads of its own. This
            # one's would stay beside those of the engine's thread, and with more of them than cores none waits
            # actively any more: steps took a fifth to a half longer (perf/LOG.md).
            with ThreadPoolExecutor(1, "load") as loading:
                loading.submit(self._load, json.loads(args["model_config"]), args).result()
        except EngineError as error:
            raise pb_utils.TritonModelException(f"llama: {error}") from error

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse] | None:
        """Hand Triton's batch over, and return when every row of it is sure of a slot at the next step, or is answered.

        In-flight, answers go out through the requests' response senders. Under `scheduling: batch` they are returned
        together, when the last row has ended.
        """
        answers = [self._decode(request) for request in requests]
        tickets = [ticket for answer in answers for ticket in answer.tickets]
        self._scheduler.submit(tickets)
        if self._inflight:
            self._scheduler.wait_for_seats(tickets)
            return None
        self._scheduler.wait_for_ends(tickets)
        return [answer.give() for answer in answers]

    def is_ready(self) -> bool:
        """Tell whether a request that came now would be decoded. Triton asks from 26.03 on, and waits 5 s."""
        return self._readiness.check()

    def finalize(self) -> None:
        """Let running rows finish within the settings' bound, answer the others, and end the threads."""
        self._scheduler.stop(self._settings.drain_seconds)
        if not self._delivery.close(CLOSE_SECONDS):
            _log.error("some answers could not be sent before the model was unloaded")
        self._meter.close(CLOSE_SECONDS)
        _log.info("model unloaded")

    def _load(self, model_config: dict[str, Any], args: dict[str, str]) -> None:
        settings = self._settings = Settings.parse(own_parameters(model_config), os.environ)
        if settings.log_format == "json":
            write_json(logging.getLogger("llama_engine"))
        _log.info("settings: %s", settings.describe())
        self._decoupled = is_decoupled(model_config)
        self._inflight = settings.scheduling == "inflight"
        if self._decoupled and not self._inflight:
            raise InvalidSettings(f"scheduling is {settings.scheduling!r}; a decoupled config needs 'inflight'")
        checkpoint = load_checkpoint(settings, choose_device(settings.device, gpu_of(args)))
        if checkpoint.prepared is not None:
            _log.info("%s", checkpoint.prepared.describe())
        _log.info("%s", checkpoint.info.describe())
        if checkpoint.info.threshold:
            _log.warning(
                "outlier threshold %g: a row's result depends on its batch; LLAMA_INT8_THRESHOLD=0 avoids that",
                checkpoint.info.threshold,
            )
        engine = Engine(checkpoint, settings, settings.slots or int(str(model_config["max_batch_size"])))
        _log.info("%s", engine.plan.describe())
        _log.info("a request that leaves an input out gets: %s", engine.defaults.describe())
        engine.prove()
        _log.info("%s", engine.describe_steps())
        self._engine = engine
        self._parser = RequestParser(checkpoint.tokenizer, engine.defaults, engine.max_model_len)
        self._queue_policy = QueuePolicy.of(model_config)
        self._request_log = RequestLog(settings.log_requests)
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._meter = Meter(TritonMetrics(_family, labels, instance_of(args)), engine.slots, self._queue_policy.size)
        self._delivery = Delivery()
        self._scheduler = Scheduler(engine, self._delivery, self._meter, self._settings.stuck_seconds)
        self._readiness = Readiness(engine, self._scheduler)

    def _decode(self, request: pb_utils.InferenceRequest) -> _Answer:
        """Return the answer to be, with a ticket for each of the request's rows; for a bad request what is wrong."""
        answer = _Answer(request, self._request_log, sends=self._inflight)
        deadline = self._queue_policy.deadline(request.timeout())
        try:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            unknown = sorted(_request_parameters(request) - HARMLESS_PARAMETERS)
            if unknown:
                # A misspelled input arrives as a parameter; ignoring it would be a silent default.
                raise InvalidRequest(f"{unknown[0]} is no input of this model, and it takes no request parameters")
            for name in COMPATIBILITY_INPUTS:
                inputs.pop(name, None)
            stream = "stream" in inputs and bool(inputs.pop("stream").any())
            if stream and not self._decoupled:
                raise InvalidRequest("stream is true; it must be false: this config answers in one response")
            parsed = self._parser.parse(inputs)
            if stream and len(parsed) > 1:
                raise InvalidRequest(f"stream is true for {len(parsed)} rows; it must be false, or the request one row")
            answer.streams = stream
            answer.tickets = [
                Ticket(self._engine.row(one, answer.name), answer, index, stream, deadline)
                for index, one in enumerate(parsed)
            ]
        except InvalidRequest as error:
            self._refuse(answer, error)
        except Exception:  # noqa: BLE001 - left to Triton it would fail the whole batch, and show the client a traceback
            _log.exception("request %s could not be read; it is answered with an error", answer.name)
            self._refuse(answer, GenerationError("the request could not be read; the server's log has the reason"))
        return answer

    def _refuse(self, answer: _Answer, error: RequestError) -> None:
        answer.refusal = error
        self._meter.refused(error)
        self._delivery.post([(answer, Part(0, error))])


class _Answer:
    """The way back to the client of one request: a Reply with Triton at its other end."""

    def __init__(self, request: pb_utils.InferenceRequest, log: RequestLog, sends: bool) -> None:
        """sends: through the request's response sender; otherwise whoever executes the request returns it."""
        self.name = log.name(_id_of(request))
        self._log = log
        self._sender = request.get_response_sender() if sends else None
        # The request itself, with its tensors, isn't kept longer than it is needed.
        self._asked = self._sender or request
        self._complete = False
        # Triton crashes if it is asked about a request that is, or is just being, answered to the end.
        self._asking = threading.Lock()
        self.streams = False
        self.tickets: list[Ticket] = []
        self.refusal: RequestError | None = None

    def send(self, parts: Sequence[Part]) -> None:
        """Send the pieces of a streamed row as they come, and anything else once all rows have ended."""
        if self._sender is None or self._complete:
            return
        try:
            self._send_parts(self._sender, parts)
        except Exception:  # noqa: BLE001 - a text with a hole must not look whole, and silence is no answer
            _log.exception("the answer to request %s could not be sent; its client gets an error", self.name)
            self.refusal = GenerationError("the answer could not be sent; the server's log has the reason")
            self._send(self._sender, _encode_error(self.refusal), final=True)
        finally:
            if self._complete:
                self._log.answered(self.name, self.tickets, self.streams, self.refusal)
                # Each ticket knows its answer: without the cycle both are freed at once.
                self.tickets = []

    def give(self) -> pb_utils.InferenceResponse:
        """Return the response of a request whose rows have all ended, to be sent by Triton."""
        with self._asking:
            self._complete = True
        self._log.answered(self.name, self.tickets, self.streams, self.refusal)
        return self.encode()

    def encode(self) -> pb_utils.InferenceResponse:
        """Build the response of a request whose rows have all ended."""
        outcomes = [ticket.outcome for ticket in self.tickets]
        errors = [outcome for outcome in (self.refusal, *outcomes) if isinstance(outcome, RequestError)]
        if errors:
            return _encode_error(errors[0])
        completions = [outcome for outcome in outcomes if isinstance(outcome, Completion)]
        return _response(
            [completion.text for completion in completions],
            [completion.finish_reason for completion in completions],
            [completion.num_input_tokens for completion in completions],
            [completion.num_output_tokens for completion in completions],
        )

    def is_cancelled(self) -> bool:
        """Ask Triton whether the client has taken the request back."""
        with self._asking:
            return not self._complete and self._asked.is_cancelled()

    def _send_parts(self, sender: pb_utils.InferenceResponseSender, parts: Sequence[Part]) -> None:
        last = parts[-1].what
        if not self.streams:
            if all(ticket.outcome is not None for ticket in self.tickets):
                self._send(sender, self.encode(), final=True)
            return
        pieces = [part.what for part in parts if isinstance(part.what, Piece)]
        if not isinstance(last, RequestError):
            self._send(sender, _encode_pieces(pieces, last), final=isinstance(last, Completion))
            return
        if pieces:
            self._send(sender, _encode_pieces(pieces, pieces[-1]), final=False)
        self._send(sender, _encode_error(last), final=True)

    def _send(
        self, sender: pb_utils.InferenceResponseSender, response: pb_utils.InferenceResponse, final: bool
    ) -> None:
        with self._asking:
            # First, because nothing may follow a final flag, not even after a failure to send it.
            self._complete = final
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)


def _request_parameters(request: pb_utils.InferenceRequest) -> set[str]:
    """Return the names of a request's parameters. Raises InvalidRequest where they aren't even text."""
    try:
        return set(json.loads(request.parameters() or "{}"))
    except ValueError as error:
        # Triton passes on whatever bytes were sent.
        raise InvalidRequest("the request has parameters that are not UTF-8, and it takes none") from error


def _encode_pieces(pieces: Sequence[Piece], last: Piece | Completion) -> pb_utils.InferenceResponse:
    """Join pieces of a row; what is known of the whole row comes with its last one."""
    return _response(
        ["".join(piece.text for piece in pieces)],
        [last.finish_reason if isinstance(last, Completion) else ""],
        [last.num_input_tokens if isinstance(last, Completion) else 0],
        [sum(piece.num_tokens for piece in pieces)],
    )


def _encode_error(error: RequestError) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), _code(error)))


def _code(error: RequestError) -> int:
    if isinstance(error, InvalidRequest):
        return pb_utils.TritonError.INVALID_ARG
    if isinstance(error, Cancelled):
        return pb_utils.TritonError.CANCELLED
    return pb_utils.TritonError.UNAVAILABLE if isinstance(error, Unavailable) else pb_utils.TritonError.INTERNAL


def _response(
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


def _strings(name: str, values: list[str]) -> pb_utils.Tensor:
    return pb_utils.Tensor(name, np.array([[value.encode()] for value in values], dtype=np.object_))


def _counts(name: str, values: list[int]) -> pb_utils.Tensor:
    return pb_utils.Tensor(name, np.array(values, dtype=np.int32).reshape(-1, 1))


def _id_of(request: pb_utils.InferenceRequest) -> str:
    """Return the id that the client gave a request, empty if it gave none."""
    try:
        return request.request_id()
    except UnicodeDecodeError:
        # Over HTTP it may be any bytes; what is no text is no id.
        return ""


def _family(metric: Metric) -> pb_utils.MetricFamily:
    kinds = {
        "counter": pb_utils.MetricFamily.COUNTER,
        "gauge": pb_utils.MetricFamily.GAUGE,
        "histogram": pb_utils.MetricFamily.HISTOGRAM,
    }
    return pb_utils.MetricFamily(name=metric.name, description=metric.help, kind=kinds[metric.kind])
