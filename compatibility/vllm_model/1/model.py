"""Adapts llama to the inputs, defaults and outputs of Triton's vllm_backend, so that its clients run unmodified.

Differences from llama: tensors have no row dimension; `sampling_parameters` replaces the request parameters instead of
being merged with them; without `stream` the text includes the prompt; outputs other than the text are returned only if
a `return_*` input enables them; token counts are UINT32.

Requests are forwarded to llama through Triton as in llama_unary, whose model.py explains FORWARDED_PARAMETERS and the
error codes.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import triton_python_backend_utils as pb_utils

MODEL = "llama"
FORWARDED_PARAMETERS = "llama_unary"
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

MAX_CONCURRENT_REQUESTS = 32
"""Each request holds a thread of Triton's pool for this instance, whose default size this is."""

OUTPUTS = (
    "text_output",
    "sequence_index",
    "finish_reason",
    "cum_log_probs",
    "logprobs",
    "num_input_tokens",
    "num_output_tokens",
)
"""Outputs requested from llama, from which the outputs of this model are built."""


class Passed:
    """One request that is forwarded to llama."""

    def __init__(self, request: pb_utils.InferenceRequest) -> None:
        self._request: pb_utils.InferenceRequest | None = request
        self._sender: pb_utils.InferenceResponseSender | None = request.get_response_sender()
        self._returned: set[str] = set()
        # Send only requested outputs. Triton's sender drops the others itself, but on 2.51 frees them without the GIL,
        # which corrupts memory.
        self._requested = frozenset(request.requested_output_names())

    def answer(self) -> None:
        """Forward the request and send the responses; the last one, possibly an error, has the final flag."""
        try:
            for response in self._to_llama().exec(decoupled=True):
                if response.has_error():
                    self._send(_error(response.error().message()), final=True)
                elif tensors := {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}:
                    # With several choices, the last one to end is unknown; an empty final response follows.
                    ended = "sequence_index" not in tensors and all(tensors["finish_reason"])
                    self._send(pb_utils.InferenceResponse(self._outputs(tensors)), ended)
            self._send(None, final=True)
        except ValueError as error:
            self._send(_error(f"INVALID_ARG: {error}"), final=True)
        except pb_utils.TritonModelException as error:
            self._send(_error(str(error)), final=True)
        except Exception as error:  # noqa: BLE001 - any failure: the client must get a response
            pb_utils.Logger.log_error(f"vllm_model: a request failed: {type(error).__name__}: {error}")
            message = "INTERNAL: the request could not be passed on; the server's log has the reason"
            self._send(_error(message), final=True)

    def _to_llama(self) -> pb_utils.InferenceRequest:
        """Return the request for llama. Raises ValueError for parameters that are not JSON."""
        request = self._request
        assert request is not None
        inputs = {tensor.name(): tensor.as_numpy()[np.newaxis] for tensor in request.inputs()}
        returns = [name for name in inputs if name.startswith("return_")]
        self._returned = {name for name in returns if inputs.pop(name).all()}
        if "sampling_parameters" not in inputs:
            parameters = json.loads(request.parameters() or "{}")
            # Triton passes the id of a request to /generate as a parameter.
            parameters.pop("id", None)
            inputs["sampling_parameters"] = np.array([[json.dumps(parameters).encode()]], dtype=np.object_)
        inputs.setdefault("exclude_input_in_output", np.array([[bool(np.any(inputs.get("stream", False)))]]))
        if "return_cumulative_logprob" in self._returned:
            inputs["return_log_probs"] = np.array([[True]])
        return pb_utils.InferenceRequest(
            model_name=MODEL,
            request_id=_id(request),
            inputs=[pb_utils.Tensor(name, value) for name, value in inputs.items()],
            requested_output_names=list(OUTPUTS),
            parameters={FORWARDED_PARAMETERS: json.dumps([{}, True])},
            timeout=request.timeout(),
        )

    def _outputs(self, tensors: dict[str, np.ndarray]) -> list[pb_utils.Tensor]:
        texts = tensors["text_output"]
        outputs = {name: tensors[name] for name in ("text_output", "sequence_index") if name in tensors}
        if "return_finish_reason" in self._returned:
            # vllm_backend writes Python's None as text.
            outputs["finish_reason"] = np.array([reason or b"None" for reason in tensors["finish_reason"]], np.object_)
        if "return_cumulative_logprob" in self._returned:
            outputs["cumulative_logprob"] = tensors["cum_log_probs"]
        if "return_logprobs" in self._returned:
            outputs["logprobs"] = tensors.get("logprobs", np.array([b"null"] * len(texts), np.object_))
        if "return_num_input_tokens" in self._returned:
            outputs["num_input_tokens"] = tensors["num_input_tokens"][:1].astype(np.uint32)
        if "return_num_output_tokens" in self._returned:
            outputs["num_output_tokens"] = tensors["num_output_tokens"].astype(np.uint32)
        return [pb_utils.Tensor(name, value) for name, value in outputs.items() if name in self._requested]

    def _send(self, response: pb_utils.InferenceResponse | None, final: bool) -> None:
        """Send a response, or with None only the final flag. After a final flag, do nothing."""
        if self._sender is None:
            return
        sender = self._sender
        if final:
            # Destroying a request at interpreter shutdown crashes the process.
            self._sender = self._request = None
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        if response is None:
            sender.send(flags=flags)
        else:
            sender.send(response, flags=flags)


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
            self._threads.submit(self._answer, Passed(request))

    def finalize(self) -> None:
        """Wait until all responses have been sent; Triton then unloads the model."""
        self._threads.shutdown()

    def _answer(self, passed: Passed) -> None:
        try:
            passed.answer()
        except Exception as error:  # noqa: BLE001 - the executor would drop the exception silently
            pb_utils.Logger.log_error(f"vllm_model: a response could not be sent: {type(error).__name__}: {error}")
        finally:
            self._free.release()


def _id(request: pb_utils.InferenceRequest) -> str:
    try:
        return request.request_id()
    except UnicodeDecodeError:
        # Triton accepts arbitrary bytes over HTTP.
        return ""


def _error(message: str) -> pb_utils.InferenceResponse:
    """Return an error response with the code that llama's message begins with, or that Triton's message means."""
    code, separator, _ = message.partition(": ")
    code = _TRITON_CODES.get(code, code)
    if not (separator and code.isupper() and hasattr(pb_utils.TritonError, code)):
        code = "UNAVAILABLE" if any(text in message for text in _UNAVAILABLE) else "INTERNAL"
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, code)))
