"""The arguments that both clients take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Generic, TypeVar, Unpack

from triton_llama.address import Protocol, ServerAddress
from triton_llama.sampling_params import SamplingOptions, SamplingParams
from triton_llama.tensors import PreparedRequest, prepare

TransportT = TypeVar("TransportT")


class BaseClient(Generic[TransportT]):
    """The arguments of both clients."""

    def __init__(
        self,
        url: str,
        protocol: Protocol = "http",
        model: str = "llama",
        *,
        timeout: float = 60.0,
        connect_timeout: float = 5.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Check the arguments; the first request connects.

        Args:
            url: `HOST:PORT`, or with a scheme: `http://`, `https://`, `grpc://`, `grpcs://`.
            protocol: `http` or `grpc`.
            model: the model's name in the repository.
            timeout: seconds. Over gRPC for a whole request or stream, after which the server cancels it. Over HTTP for
                each wait: to connect, to send, and for the next bytes of the answer, so that a stream may take longer
                as long as it goes on. A stream over HTTP is then cancelled on the server; another request is not.
            connect_timeout: seconds of `timeout` that making a connection may take.
            headers: sent with every request (an `Authorization` for a gateway, say).

        Raises:
            ValueError: a malformed URL, an unknown protocol, a timeout that isn't positive.
        """
        self.server = ServerAddress.parse(url, protocol)
        self.model = model
        self._timeout = _check_seconds("timeout", timeout)
        self._transport = self._open(_check_seconds("connect_timeout", connect_timeout), headers or {})
        # Set at the first refusal of a streaming (decoupled) model. Streams take every model, but over HTTP they carry
        # no status for errors, so they aren't the first choice.
        self._decoupled = False

    def _open(self, connect_timeout: float, headers: Mapping[str, str]) -> TransportT:
        raise NotImplementedError

    def _prepare(
        self,
        prompt: str,
        params: SamplingParams | None,
        stream: bool,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> tuple[PreparedRequest, float]:
        """Return a request and its timeout."""
        return prepare(prompt, (params or SamplingParams()).with_options(**sampling), stream), self._seconds(timeout)

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else _check_seconds("timeout", timeout)


def _check_seconds(name: str, seconds: float) -> float:
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"{name} is {seconds}, must be a positive number of seconds")
    return seconds
