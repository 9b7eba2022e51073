"""Serves /infer and unary gRPC when llama is decoupled, because Triton takes requests for it over streams only.

Each request is forwarded to llama through Triton and gets one response. Triton 2.51 drops fractional parameters and
error codes of forwarded requests. So the parameters are forwarded as one JSON string (FORWARDED_PARAMETERS), and the
codes are those that llama's messages begin with.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import triton_python_backend_utils as pb_utils

FORWARDED_PARAMETERS = "llama_unary"  # a request parameter: JSON of [the client's ones, whether a stream may answer]
MAX_CONCURRENT_REQUESTS = 32  # as many as Triton's pool for this instance has threads
# Triton's error codes of those of llama's codes that Triton doesn't have.
_TRITON_CODES = {
    "CONTEXT_LENGTH": "INVALID_ARG",
    "QUEUE_FULL": "UNAVAILABLE",
    "OTHER_MODEL": "UNAVAILABLE",
    "OTHER_ADAPTER": "UNAVAILABLE",
    "STOPPING": "UNAVAILABLE",
}
# Parts of Triton's messages for requests that it refuses itself as UNAVAILABLE; their codes are lost.
_UNAVAILABLE = ("Exceeds maximum queue size", "Request timeout expired", "is not ready", "is not at ready state")


class TritonPythonModel:
    """One instance of the model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the threads."""
        self._free = threading.Semaphore(MAX_CONCURRENT_REQUESTS)
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS, "forward")

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        """Forward the requests; return when each has a thread, so that further requests wait in Triton's queue."""
        for request in requests:
            self._free.acquire()
            self._threads.submit(self._answer, request)

    def finalize(self) -> None:
        """Wait until all responses have been sent."""
        self._threads.shutdown()

    def _answer(self, request: pb_utils.InferenceRequest) -> None:
        sender, final = request.get_response_sender(), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        try:
            sender.send(_forward(request), flags=final)
        except Exception as error:  # noqa: BLE001 - any failure: the client must get a response
            pb_utils.Logger.log_error(f"llama_unary: a request failed: {type(error).__name__}: {error}")
            sender.send(_error("INTERNAL: the request failed; the server's log has the reason"), flags=final)
        finally:
            # Last, because Triton's pool needs a free thread for the response.
            self._free.release()


def _forward(request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
    to_llama = pb_utils.InferenceRequest(
        model_name="llama",
        request_id=request.request_id(),
        inputs=request.inputs(),
        requested_output_names=list(request.requested_output_names()),
        parameters={FORWARDED_PARAMETERS: json.dumps([json.loads(request.parameters() or "{}"), False])},
        timeout=request.timeout(),
    )
    try:
        responses = list(to_llama.exec(decoupled=True))
    except pb_utils.TritonModelException as error:
        return _error(str(error))
    # The last response can be empty.
    response = next(response for response in responses if response.has_error() or response.output_tensors())
    if response.has_error():
        return _error(response.error().message())
    return pb_utils.InferenceResponse(response.output_tensors())


def _error(message: str) -> pb_utils.InferenceResponse:
    """Return an error response with the code that llama's message begins with, or that Triton's message means."""
    code, separator, _ = message.partition(": ")
    code = _TRITON_CODES.get(code, code)
    if not (separator and code.isupper() and hasattr(pb_utils.TritonError, code)):
        code = "UNAVAILABLE" if any(text in message for text in _UNAVAILABLE) else "INTERNAL"
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, code)))
