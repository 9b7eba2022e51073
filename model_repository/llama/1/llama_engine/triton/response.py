"""The response to a request: its chunks and results, encoded as Triton's and sent.

They reach a response through the dispatcher; a response sender, or `execute`, passes it to the client.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter

import triton_python_backend_utils as pb_utils

from llama_engine.errors import Cancelled, GenerationError, InvalidRequest, RequestError, Unavailable
from llama_engine.events import Chunk, Completion, Event
from llama_engine.observability.log import RequestLog
from llama_engine.optional_outputs import LogProbsWriter, Span
from llama_engine.response_dispatcher import ResponseDispatcher
from llama_engine.sequence import Sequence
from llama_engine.text.tokenizer import Tokenizer
from llama_engine.triton.tensors import choice_tensor, chunk_tensors, completion_tensors, optional_tensors

MAX_TOKENS_AT_ONCE = 128
"""Whose log probabilities are written between the responses of other requests: with 20 others each, some ms."""

_log = logging.getLogger(__name__)


class Response:
    """The response to one request: the sink of its sequences, with Triton at its other end."""

    def __init__(
        self,
        request: pb_utils.InferenceRequest,
        log: RequestLog,
        name: str,
        tokenizer: Tokenizer,
        dispatcher: ResponseDispatcher | None,
    ) -> None:
        """name: of the request in the log. dispatcher: calls `send`; None where `execute` returns `build`."""
        self.name = name
        self._log = log
        self._writer = LogProbsWriter(tokenizer)
        self._dispatcher = dispatcher
        # All of the config's where the client names none.
        self._requested = frozenset(request.requested_output_names())
        self._sender = request.get_response_sender() if dispatcher is not None else None
        # The request with its tensors is kept only where there is no sender to ask.
        self._cancellable: pb_utils.InferenceResponseSender | pb_utils.InferenceRequest | None
        self._cancellable = self._sender or request
        self._complete = False
        # Triton crashes when it is asked about a request whose final response is sent, or just being sent.
        self._sending = threading.Lock()
        self.stream = False
        self.names_codes = False
        """Whether error messages begin with their code: Triton drops the code of a response to another model."""
        self.sequences: list[Sequence] = []
        # Of a stream: choices that go on, and how many tokens of each have been sent.
        self._unfinished = 0
        self._sent: Counter[int] = Counter()
        # Sequences with the likeliest tokens as an output, and events that wait for their JSON.
        self._with_json: list[Sequence] = []
        self._held: list[Event] = []
        self.error: RequestError | None = None
        """Replaces the sequences' results: the request was refused, or its response could not be sent."""

    def add(self, sequences: list[Sequence]) -> None:
        """Take the sequences that this is the response to, before any of them is scheduled."""
        self.sequences, self._unfinished = sequences, len(sequences)
        self._with_json = [
            sequence
            for sequence in sequences
            if sequence.request.prompt_logprobs is not None or sequence.request.num_logprobs is not None
        ]

    def send(self, events: list[Event]) -> None:
        """Send a stream's chunks as they come, and any other response once all sequences have finished."""
        if self._sender is None or self._dispatcher is None or self._complete:
            return
        try:
            self._held += events
            if self._with_json and not self._write_json():
                self._dispatcher.post_again(self)
                return
            held, self._held = self._held, []
            self._send_events(self._sender, held)
        except Exception:  # noqa: BLE001 - a text with a hole must not look complete, and silence is no response
            _log.exception("the response to request %s could not be sent; its client gets an error", self.name)
            self.error = GenerationError("the answer could not be sent; the server's log has the reason")
            self._send(self._sender, self._error(self.error), final=True)
        finally:
            if self._complete:
                self._end()

    def _write_json(self) -> bool:
        """Write a part of the log probabilities' JSON; return whether it is complete.

        A part at a time, so that the chunks of other streams don't wait for thousands of tokens.
        """
        computed = [sequence for sequence in self._with_json if sequence.num_output_tokens]
        return all(self._writer.write_some(sequence, MAX_TOKENS_AT_ONCE) for sequence in computed)

    def build(self) -> pb_utils.InferenceResponse:
        """Return the response of a request whose sequences have all finished, for Triton to send."""
        with self._sending:
            self._complete = True
        response = self._encode()
        self._end()
        return response

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled the request, as Triton says.

        After the final response, which may be the error of one choice, nothing reads its other sequences.
        """
        with self._sending:
            return self._complete or (self._cancellable is not None and self._cancellable.is_cancelled())

    def _end(self) -> None:
        """Log the answered request, and release its sequences and tensors."""
        self._log.record(self.name, self.sequences, self.stream, self.error)
        # Each sequence refers to its sink: without the cycle both are freed at once.
        self.sequences, self._with_json = [], []
        # A request and its sender that are destroyed with the interpreter end the process with signal 11, and the
        # engine still refers to the sequences of its last step.
        self._sender = self._cancellable = None

    def _encode(self) -> pb_utils.InferenceResponse:
        results = [sequence.result for sequence in self.sequences]
        errors = [result for result in (self.error, *results) if isinstance(result, RequestError)]
        if errors:
            return self._error(errors[0])
        tensors = completion_tensors([result for result in results if isinstance(result, Completion)])
        if any(sequence.request.has_optional_outputs for sequence in self.sequences):
            spans = [Span(sequence, 0, sequence.num_output_tokens) for sequence in self.sequences]
            tensors += optional_tensors(spans, self._writer, final=True)
        return self._of_requested(tensors)

    def _error(self, error: RequestError) -> pb_utils.InferenceResponse:
        code = _code(error)
        message = f"{code}: {error}" if self.names_codes else str(error)
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, code)))

    def _send_events(self, sender: pb_utils.InferenceResponseSender, events: list[Event]) -> None:
        if not self.stream:
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
            # The last one of these is sent last: choices that finished before have no events any more.
            self._send(sender, self._chunk(choice, its_events), final=self._unfinished == 0)
        if error is not None:
            self._send(sender, self._error(error), final=True)

    def _chunk(self, choice: int, events: list[Chunk | Completion]) -> pb_utils.InferenceResponse:
        """Join the chunks of a choice that accumulated; the finish reason comes with the last one of the sequence."""
        sequence, last = self.sequences[choice], events[-1]
        chunks = [event for event in events if isinstance(event, Chunk)]
        count = sum(chunk.num_tokens for chunk in chunks)
        completion = last if isinstance(last, Completion) else None
        tensors = chunk_tensors("".join(chunk.text for chunk in chunks), completion, sequence.num_prompt_tokens, count)
        if len(self.sequences) > 1:
            tensors.append(choice_tensor(choice))
        if sequence.request.has_optional_outputs:
            first = self._sent[choice]
            self._sent[choice] += count
            span = Span(sequence, first, first + count)
            tensors += optional_tensors([span], self._writer, final=completion is not None)
        return self._of_requested(tensors)

    def _of_requested(self, tensors: list[pb_utils.Tensor]) -> pb_utils.InferenceResponse:
        """Return a response of the tensors whose outputs the client requests.

        Triton's sender leaves the others out, too, but destroys them while other threads run Python: on 2.51 that
        corrupts the process's memory, and one request in tens of thousands ends it.
        """
        return pb_utils.InferenceResponse([tensor for tensor in tensors if tensor.name() in self._requested])

    def _send(
        self, sender: pb_utils.InferenceResponseSender, response: pb_utils.InferenceResponse, final: bool
    ) -> None:
        with self._sending:
            # First: nothing may follow a final flag, not even after a failure to send it.
            self._complete = final
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)


def _code(error: RequestError) -> str:
    """Return the name of Triton's code."""
    if isinstance(error, InvalidRequest):
        return "INVALID_ARG"
    if isinstance(error, Cancelled):
        return "CANCELLED"
    return "UNAVAILABLE" if isinstance(error, Unavailable) else "INTERNAL"
