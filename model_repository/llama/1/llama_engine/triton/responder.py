"""Responds to a request: encodes chunks and results as Triton responses and sends them.

The dispatcher passes the events to `Responder.send`, which uses a response sender. Under `scheduling: batch`, `execute`
returns `Responder.build` instead.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

import triton_python_backend_utils as pb_utils

from llama_engine.engine.dispatcher import ResponseDispatcher
from llama_engine.engine.events import Chunk, Completion, Event
from llama_engine.engine.sequence import Sequence
from llama_engine.errors import GenerationError, RequestError
from llama_engine.observability.log import RequestLog
from llama_engine.text.tokenizer import Tokenizer
from llama_engine.triton.outputs import (
    LogProbsWriter,
    Span,
    choice_tensor,
    chunk_tensors,
    completion_tensors,
    optional_outputs,
    text_tensor,
)

MAX_TOKENS_AT_ONCE = 128
"""Maximum tokens whose log probabilities one `send` serializes: a few ms with 20 alternatives each."""

_TRITON_CODES = {
    "CONTEXT_LENGTH": "INVALID_ARG",
    "QUEUE_FULL": "UNAVAILABLE",
    "OTHER_MODEL": "UNAVAILABLE",
    "OTHER_ADAPTER": "UNAVAILABLE",
    "STOPPING": "UNAVAILABLE",
}
"""Triton's error codes of those of our codes that Triton doesn't have."""

_log = logging.getLogger(__name__)


class Responder:
    """Responds to one request: the sink of its sequences, which sends their events through Triton."""

    def __init__(
        self,
        request: pb_utils.InferenceRequest,
        log: RequestLog,
        name: str,
        tokenizer: Tokenizer,
        dispatcher: ResponseDispatcher | None,
    ) -> None:
        """name: the request's name in the log. dispatcher: calls `send`; None if `execute` returns `build`."""
        self.name = name
        self._log = log
        self._writer = LogProbsWriter(tokenizer)
        self._dispatcher = dispatcher
        # Triton fills in all outputs of the config if the client names none.
        self._requested = frozenset(request.requested_output_names())
        self._sender = request.get_response_sender() if dispatcher is not None else None
        # The object is polled for cancellation. The request, with its tensors, is stored only if there is no sender.
        self._cancellable: pb_utils.InferenceResponseSender | pb_utils.InferenceRequest | None
        self._cancellable = self._sender or request
        self._complete = False
        # Guards against polling for cancellation during or after the final response, which crashes Triton.
        self._sending = threading.Lock()
        self.stream = False
        self.sequences: list[Sequence] = []
        # Streams need the number of unfinished choices, and the number of tokens sent of each choice.
        self._unfinished = 0
        self._sent: Counter[int] = Counter()
        # Sequences with log probabilities as JSON, and events that wait for it.
        self._with_json: list[Sequence] = []
        self._pending: list[Event] = []
        self.error: RequestError | None = None
        """Error of the whole request, instead of the sequences' results: it was refused, or sending failed."""
        self.text: str | None = None
        """The answer to a request that has no sequences: the model's description, or the loaded adapters."""
        self.trace: Callable[[list[Sequence]], None] | None = None
        """Records the spans of the finished request; None if it isn't traced."""

    def add(self, sequences: list[Sequence]) -> None:
        """Set the request's sequences, before any of them is scheduled."""
        self.sequences, self._unfinished = sequences, len(sequences)
        # The client has the text of the tokens that a request resumes.
        self._sent.update({choice: len(sequence.request.resume_ids) for choice, sequence in enumerate(sequences)})
        self._with_json = [
            sequence
            for sequence in sequences
            if sequence.request.prompt_logprobs is not None or sequence.request.num_logprobs is not None
        ]

    def refuse(self, error: RequestError) -> None:
        """Set the error of the whole request."""
        # The traceback's frames refer to the request, and the responder to the error. Such a cycle can keep the request
        # until interpreter shutdown, when destroying it crashes the process with signal 11.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        self.error = error

    def send(self, events: list[Event]) -> None:
        """Send the chunks of a stream, or the whole response once all sequences have finished."""
        if self._sender is None or self._dispatcher is None or self._complete:
            return
        try:
            self._pending += events
            if self._with_json and not self._write_json():
                self._dispatcher.wake(self)
                return
            pending, self._pending = self._pending, []
            self._send_events(self._sender, pending)
        except Exception:  # noqa: BLE001 - any failure: the client must get an error, not an incomplete text
            _log.exception("the response to request %s could not be sent; its client gets an error", self.name)
            self.error = GenerationError("the answer could not be sent; the server's log has the reason")
            self._send(self._sender, self._error(self.error), final=True)
        finally:
            if self._complete:
                self._end()

    def _write_json(self) -> bool:
        """Serialize log probabilities of at most MAX_TOKENS_AT_ONCE tokens per sequence; return whether all are done.

        The limit keeps the serialization of thousands of tokens from delaying the chunks of other streams.
        """
        # Before its first own token, a sequence's lists grow, and a preemption replaces them.
        computed = [sequence for sequence in self._with_json if sequence.has_sampled]
        return all(self._writer.serialize_up_to(sequence, MAX_TOKENS_AT_ONCE) for sequence in computed)

    def build(self) -> pb_utils.InferenceResponse:
        """Return the response of a request whose sequences have all finished, for `execute` to return."""
        with self._sending:
            self._complete = True
        response = self._encode()
        self._end()
        return response

    def is_cancelled(self) -> bool:
        """Return whether Triton reports the request as cancelled, or the final response has been sent.

        The final response can be the error of one choice; the request's other sequences are then useless.
        """
        with self._sending:
            return self._complete or (self._cancellable is not None and self._cancellable.is_cancelled())

    def _end(self) -> None:
        """Log and trace the finished request, and release its sequences and tensors."""
        if self.text is None:
            self._log.record(self.name, self.sequences, self.stream, self.error)
        # Break the reference cycle between sequences and their sink.
        sequences, self.sequences, self._with_json = self.sequences, [], []
        # Destroying a request or its sender at interpreter shutdown crashes the process with signal 11. The engine
        # still refers to the sequences of its last step, and they to this sink.
        self._sender = self._cancellable = None
        if self.trace is not None:
            self.trace(sequences)

    def _encode(self) -> pb_utils.InferenceResponse:
        results = [sequence.result for sequence in self.sequences]
        errors = [result for result in (self.error, *results) if isinstance(result, RequestError)]
        if errors:
            return self._error(errors[0])
        if self.text is not None:
            return self._of_requested([text_tensor(self.text)])
        tensors = completion_tensors(self.sequences)
        if any(sequence.request.has_optional_outputs for sequence in self.sequences):
            spans = [Span(sequence, 0, sequence.num_output_tokens) for sequence in self.sequences]
            tensors += optional_outputs(spans, self._writer, final=True)
        return self._of_requested(tensors)

    def _error(self, error: RequestError) -> pb_utils.InferenceResponse:
        # Triton drops the code in streams and in responses to another model; there the message tells it.
        code = getattr(pb_utils.TritonError, _TRITON_CODES.get(error.code, error.code))
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{error.code}: {error}", code))

    def _send_events(self, sender: pb_utils.InferenceResponseSender, events: list[Event]) -> None:
        if not self.stream:
            # Also a description or an adapter's answer, which have no sequences.
            if all(sequence.result is not None for sequence in self.sequences):
                self._send(sender, self._encode(), final=True)
            return
        of_choices: dict[int, list[Chunk | Completion]] = {}
        error: RequestError | None = None
        for event in events:
            if isinstance(event, RequestError):
                error = error or event
            else:
                of_choices.setdefault(event.choice, []).append(event)
        for choice, its_events in of_choices.items():
            self._unfinished -= isinstance(its_events[-1], Completion)
            # The final flag goes with the last choice to finish: the others have no more events.
            self._send(sender, self._chunk(choice, its_events), final=self._unfinished == 0)
        if error is not None:
            self._send(sender, self._error(error), final=True)

    def _chunk(self, choice: int, events: list[Chunk | Completion]) -> pb_utils.InferenceResponse:
        """Return one response for the accumulated events of a choice; its last response has the finish reason."""
        sequence, last = self.sequences[choice], events[-1]
        chunks = [event for event in events if isinstance(event, Chunk)]
        count = sum(chunk.num_tokens for chunk in chunks)
        completion = last if isinstance(last, Completion) else None
        tensors = chunk_tensors(sequence, "".join(chunk.text for chunk in chunks), count, completion)
        if len(self.sequences) > 1:
            tensors.append(choice_tensor(choice))
        if sequence.request.has_optional_outputs:
            first = self._sent[choice]
            self._sent[choice] += count
            span = Span(sequence, first, first + count)
            tensors += optional_outputs([span], self._writer, final=completion is not None)
        return self._of_requested(tensors)

    def _of_requested(self, tensors: list[pb_utils.Tensor]) -> pb_utils.InferenceResponse:
        """Return a response with only the outputs that the client requests.

        Triton's sender drops other outputs itself, but on 2.51 it destroys them without the GIL. This corrupts memory
        and crashes the process once in tens of thousands of requests.
        """
        return pb_utils.InferenceResponse([tensor for tensor in tensors if tensor.name() in self._requested])

    def _send(
        self, sender: pb_utils.InferenceResponseSender, response: pb_utils.InferenceResponse, final: bool
    ) -> None:
        with self._sending:
            # The flag is set before sending: nothing may follow a final flag, even if sending it fails.
            self._complete = final
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)
