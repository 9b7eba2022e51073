"""Requests that are on their way and can be taken back: one response or many, over gRPC, under either config."""

from __future__ import annotations

import queue
from types import TracebackType
from typing import Any

import tritonclient.grpc
from server.servers import is_decoupled
from server.wires import TIMEOUT_S, Answer, Inputs, answers, fill
from triton_local.server import LocalTriton


class Call:
    """One request over gRPC that is running: ModelInfer, or a gRPC stream under a decoupled config."""

    def __init__(
        self, server: LocalTriton, inputs: Inputs, timeout_us: int | None = None, request_id: str = ""
    ) -> None:
        """Send the request. timeout_us: how long it may wait for a slot."""
        self._client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
        self._came: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
        self._streams = is_decoupled(server)
        tensors = [fill(tritonclient.grpc.InferInput, name, value) for name, value in inputs.items()]
        if self._streams:
            self._client.start_stream(self._take)
            self._client.async_stream_infer("llama", tensors, request_id=request_id, timeout=timeout_us)
        else:
            self._call = self._client.async_infer(
                "llama", tensors, self._take, request_id=request_id, timeout=timeout_us, client_timeout=TIMEOUT_S
            )

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._client.close()

    def cancel(self) -> None:
        """Take the request back."""
        if self._streams:
            self._client.stop_stream(cancel_requests=True)
        else:
            self._call.cancel()

    def done(self) -> bool:
        """Return whether something has come that was not taken yet."""
        return not self._came.empty()

    def outcome(self) -> Answer | str:
        """Wait for the one response and return its one row, or the error's text."""
        result, error = self._came.get(timeout=TIMEOUT_S)
        if error is not None:
            return str(error)
        (answer,) = answers(result)
        return answer

    def _take(self, result: Any, error: Exception | None) -> None:  # noqa: ANN401 - tritonclient is not annotated
        self._came.put((result, error))
