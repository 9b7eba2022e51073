"""Answers /infer and unary gRPC from a streaming llama, whose requests Triton takes over streams only.

Each request goes on to llama through Triton (business logic scripting), with its inputs, id and timeout, and gets
llama's one response. What Triton 2.51 loses on this way goes around it; `llama_engine.triton.forwarded` is the other
end:

- cancellation: a file, whose name only the two models know, exists once the client has cancelled.
- request parameters that are no strings, whole numbers or booleans: all are sent as one string.
- the code of an error, which Triton replaces by INTERNAL: llama's message begins with it.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import triton_python_backend_utils as pb_utils

MODEL = "llama"

FORWARDED = "llama_unary"
"""Request parameter: JSON of [the cancellation's name, the client's own parameters]."""

CANCELLATIONS = "TRITON_LLAMA_CANCELLATIONS"
"""Environment variable: the beginning of a cancellation's path, set by the supervisor."""

UNSUPERVISED = "/dev/shm/llama_unary-cancelled-"
"""The beginning where it isn't set. Triton's Python backend needs that folder, too."""

CONCURRENT_REQUESTS = 32
"""Requests under way together: each holds a thread of Triton's pool for this instance, which has as many by default."""

POLL_SECONDS = 0.02
POLL_SHARE = 20
"""As llama's scheduler: polling takes at most one part in 20 of the time."""

FILES = "TRITON_LLAMA_REQUEST_COUNTS"
"""Environment variable: the beginning of the path of the request counts, set by the supervisor."""

CODES = ("INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL")

# Triton's own words for what it refuses in front of llama, where the code is lost.
_UNAVAILABLE = ("Exceeds maximum queue size", "Request timeout expired", "is not ready", "is not at ready state")


class Forwarded:
    """One request under way."""

    def __init__(self, request: pb_utils.InferenceRequest) -> None:
        self._name = secrets.token_hex(16)
        self._cancellation = Path(os.environ.get(CANCELLATIONS, UNSUPERVISED) + self._name)
        self._request: pb_utils.InferenceRequest | None = request
        self._sender: pb_utils.InferenceResponseSender | None = request.get_response_sender()
        # Triton crashes when it is asked about a request that is answered, or just being answered.
        self._sending = threading.Lock()

    def ask(self) -> pb_utils.InferenceResponse:
        """Pass the request on, and return llama's response, or one with what went wrong."""
        request = self._request
        assert request is not None
        try:
            parameters = json.loads(request.parameters() or "{}")
        except ValueError:
            # Triton passes on whatever bytes were sent.
            return _error("INVALID_ARG", "the request has parameters that are not UTF-8")
        responses = pb_utils.InferenceRequest(
            model_name=MODEL,
            request_id=_id(request),
            inputs=request.inputs(),
            requested_output_names=list(request.requested_output_names()),
            parameters={FORWARDED: json.dumps([self._name, parameters])},
            timeout=request.timeout(),
        ).exec(decoupled=True)
        # The last one may be empty.
        answers = [response for response in responses if response.has_error() or response.output_tensors()]
        if not answers:
            return _error("INTERNAL", f"{MODEL} sent no response")
        if answers[0].has_error():
            return _with_code(answers[0].error().message())
        return pb_utils.InferenceResponse(answers[0].output_tensors())

    def pass_cancellation_on(self) -> None:
        """Ask Triton whether the client has cancelled the request, and if so let llama know."""
        with self._sending:
            if self._sender is not None and self._sender.is_cancelled():
                self._cancellation.touch()

    def answer(self, response: pb_utils.InferenceResponse) -> None:
        """Send the response, and drop the request: one that is destroyed with the interpreter ends the process."""
        with self._sending:
            sender, self._sender, self._request = self._sender, None, None
            assert sender is not None
            self._cancellation.unlink(missing_ok=True)
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


class RequestCounts:
    """Requests accepted and answered, 8 bytes each, for the supervisor: `llama_engine.observability.request_counts`."""

    def __init__(self, model: str) -> None:
        beginning = os.environ.get(FILES)
        self._file = Path(f"{beginning}{model}-{os.getpid()}") if beginning else None
        memory: mmap.mmap | bytearray = bytearray(16)
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            with self._file.open("xb+") as file:
                file.truncate(len(memory))
                memory = mmap.mmap(file.fileno(), len(memory))
        self._counts = memoryview(memory).cast("Q")
        self._lock = threading.Lock()

    def add_accepted(self, requests: int) -> None:
        """Count requests that Triton has handed over."""
        with self._lock:
            self._counts[0] += requests

    def add_answered(self) -> None:
        """Count a request whose response Triton has, or can't be given."""
        with self._lock:
            self._counts[1] += 1

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)


class TritonPythonModel:
    """One instance of the model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the threads."""
        self._counts = RequestCounts(args["model_name"])
        self._free = threading.Semaphore(CONCURRENT_REQUESTS)
        self._under_way: set[Forwarded] = set()
        self._changed = threading.Condition()
        self._ending = False
        self._threads = ThreadPoolExecutor(CONCURRENT_REQUESTS, "forward")
        self._polling = threading.Thread(target=self._poll, name="cancellation", daemon=True)
        self._polling.start()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        """Pass the requests on, and return when each has its thread: until then the queue stays Triton's."""
        self._counts.add_accepted(len(requests))
        for request in requests:
            self._free.acquire()
            forwarded = Forwarded(request)
            with self._changed:
                self._under_way.add(forwarded)
                self._changed.notify()
            self._threads.submit(self._forward, forwarded)

    def finalize(self) -> None:
        """Wait for the last answers. Triton unloads the model only when they are sent."""
        self._counts.close()
        self._threads.shutdown()
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._polling.join()

    def _forward(self, forwarded: Forwarded) -> None:
        try:
            try:
                response = forwarded.ask()
            except pb_utils.TritonModelException as error:
                response = _with_code(str(error))
            except Exception as error:  # noqa: BLE001 - silence is no response
                pb_utils.Logger.log_error(f"llama_unary: a request failed: {type(error).__name__}: {error}")
                response = _error("INTERNAL", "the request could not be passed on; the server's log has the reason")
            with self._changed:
                self._under_way.discard(forwarded)
            try:
                forwarded.answer(response)
            finally:
                # A response that can't be sent is due no longer: a drain would wait for it.
                self._counts.add_answered()
        except Exception as error:  # noqa: BLE001 - the thread's end would go unnoticed
            pb_utils.Logger.log_error(f"llama_unary: a response could not be sent: {type(error).__name__}: {error}")
        finally:
            # Last: with as many requests as threads of Triton's pool, one of these is then free for the response.
            self._free.release()

    def _poll(self) -> None:
        """Ask Triton about every request under way, again and again."""
        pause = POLL_SECONDS
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ending, pause)
                self._changed.wait_for(lambda: self._ending or self._under_way)
                if self._ending:
                    return
                under_way = list(self._under_way)
            began = time.monotonic()
            for forwarded in under_way:
                try:
                    forwarded.pass_cancellation_on()
                except Exception as error:  # noqa: BLE001 - the others are asked about, too
                    pb_utils.Logger.log_error(f"llama_unary: a cancellation can't be passed on: {error}")
            pause = max(POLL_SECONDS, (POLL_SHARE - 1) * (time.monotonic() - began))


def _id(request: pb_utils.InferenceRequest) -> str:
    try:
        return request.request_id()
    except UnicodeDecodeError:
        # Over HTTP it may be any bytes; bytes that aren't text are no id.
        return ""


def _with_code(message: str) -> pb_utils.InferenceResponse:
    """Return an error of llama, or of Triton in front of it, with its code."""
    code, separator, rest = message.partition(": ")
    if separator and code in CODES:
        return _error(code, rest)
    return _error("UNAVAILABLE" if any(text in message for text in _UNAVAILABLE) else "INTERNAL", message)


def _error(code: str, message: str) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, code)))
