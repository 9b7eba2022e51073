"""Answers /infer and unary gRPC beside a streaming llama, whose requests Triton takes over streams only.

Each request goes on to llama through Triton, and gets its one response. On that way Triton 2.51 loses fractional
parameters and the codes of errors: parameters travel as one string, for which llama puts the code before an error.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import triton_python_backend_utils as pb_utils

FORWARDED = "llama_unary"  # a request parameter: JSON of [the client's parameters, whether a stream may answer]
MAX_CONCURRENT_REQUESTS = 32  # as many as Triton's pool for this instance has threads
# Triton's own words for what it refuses in front of llama, where the code is lost.
_UNAVAILABLE = ("Exceeds maximum queue size", "Request timeout expired", "is not ready", "is not at ready state")


class TritonPythonModel:
    """One instance of the model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the threads."""
        self._free = threading.Semaphore(MAX_CONCURRENT_REQUESTS)
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS, "forward")

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        """Forward the requests, and return when each has its thread: until then the queue stays Triton's."""
        for request in requests:
            self._free.acquire()
            self._threads.submit(self._answer, request)

    def finalize(self) -> None:
        """Wait for the last responses."""
        self._threads.shutdown()

    def _answer(self, request: pb_utils.InferenceRequest) -> None:
        sender, final = request.get_response_sender(), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        try:
            sender.send(_forward(request), flags=final)
        except Exception as error:  # noqa: BLE001 - silence is no response
            pb_utils.Logger.log_error(f"llama_unary: a request failed: {type(error).__name__}: {error}")
            sender.send(_error("INTERNAL", "the request failed; the server's log has the reason"), flags=final)
        finally:
            # Last: with as many requests as threads of Triton's pool, one of these is then free for the response.
            self._free.release()


def _forward(request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
    to_llama = pb_utils.InferenceRequest(
        model_name="llama",
        request_id=request.request_id(),
        inputs=request.inputs(),
        requested_output_names=list(request.requested_output_names()),
        parameters={FORWARDED: json.dumps([json.loads(request.parameters() or "{}"), False])},
        timeout=request.timeout(),
    )
    try:
        responses = list(to_llama.exec(decoupled=True))
    except pb_utils.TritonModelException as error:
        return _with_code(str(error))
    # The last one may be empty.
    response = next(response for response in responses if response.has_error() or response.output_tensors())
    if response.has_error():
        return _with_code(response.error().message())
    return pb_utils.InferenceResponse(response.output_tensors())


def _with_code(message: str) -> pb_utils.InferenceResponse:
    """Return an error of llama, or of Triton in front of it, with its code."""
    code, separator, rest = message.partition(": ")
    if separator and code.isupper() and hasattr(pb_utils.TritonError, code):
        return _error(code, rest)
    return _error("UNAVAILABLE" if any(text in message for text in _UNAVAILABLE) else "INTERNAL", message)


def _error(code: str, message: str) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, code)))
