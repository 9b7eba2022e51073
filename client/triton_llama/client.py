"""The synchronous client: one prompt or a list in, completions out. Knows no protocol; a transport does the talking."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, cast, overload

from triton_llama import endpoint
from triton_llama.completion import Completion
from triton_llama.completion_stream import CompletionStream
from triton_llama.endpoint import Endpoint
from triton_llama.errors import TritonLlamaError
from triton_llama.limits import Limits
from triton_llama.many import ManyRequests
from triton_llama.piece import Piece
from triton_llama.sampling_params import SamplingOptions, SamplingParams
from triton_llama.status import ServerStatus, StatusAnswers, read_status
from triton_llama.tensors import PreparedRequest, prepare

if TYPE_CHECKING:
    from typing import Self, Unpack


class Transport(Protocol):
    """What the client needs of a protocol; any thread may call any of it."""

    def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion:
        """Send one request and wait for its answer, at most `timeout` seconds."""

    def stream(self, model: str, request: PreparedRequest, timeout: float) -> Generator[Piece, None, None]:
        """Send one request at the first `next` and yield its pieces, `timeout` seconds for all; closing cancels it."""

    def status(self, model: str, timeout: float) -> StatusAnswers:
        """Ask what there is to know about the server and the model, each question within `timeout` seconds."""

    def close(self) -> None:
        """Close every connection; requests in flight in other threads end with a LlamaConnectionError."""


class LlamaClient:
    """A client of one model on one server; threads may share it.

        with LlamaClient("localhost:8000") as client:
            print(client.generate("A list comprehension", max_tokens=40).text)

    It never repeats a request by itself. Make it after a fork, not before: connections can't be shared by processes.
    """

    def __init__(
        self,
        url: str,
        protocol: endpoint.Protocol = "http",
        model: str = "llama",
        *,
        timeout: float = 60.0,
        connect_timeout: float = 5.0,
        concurrency: int = 32,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Nothing is sent before the first request.

        Args:
            url: `HOST:PORT`, or with a scheme: `http://`, `https://`, `grpc://`, `grpcs://`.
            protocol: `http` or `grpc`.
            model: the model's name in the repository.
            timeout: seconds that one request may take from connecting to the last byte; a stream to its last piece,
                the caller's own time between the pieces included. When they are over, the server is told that nobody
                waits any more; only of a request that isn't a stream it isn't over HTTP, and it completes the text.
            connect_timeout: seconds of it that making a connection may take.
            concurrency: requests in flight at most for one list of prompts; streams are as many as are asked for.
            headers: sent with every request (an `Authorization` for a gateway, say).

        Raises:
            ValueError: a URL, protocol, timeout or concurrency that can't be.
        """
        self.endpoint = Endpoint.parse(url, protocol)
        self.model = model
        self._limits = Limits(timeout, connect_timeout, concurrency)
        self._transport = _open_transport(self.endpoint, connect_timeout, headers or {})

    @overload
    def generate(
        self,
        prompt: str,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        params: SamplingParams | None = None,
        *,
        return_exceptions: Literal[False] = False,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        params: SamplingParams | None = None,
        *,
        return_exceptions: Literal[True],
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> list[Completion | TritonLlamaError]: ...

    def generate(
        self,
        prompt: str | Sequence[str],
        params: SamplingParams | None = None,
        *,
        return_exceptions: bool = False,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion | list[Completion] | list[Completion | TritonLlamaError]:
        """Complete a prompt, or each prompt of a list.

        A list goes out as that many requests, `concurrency` of them at a time, so that Triton forms the batches; the
        completions come back in the prompts' order.

        Args:
            prompt: one prompt, or a list or tuple of them.
            params: how to sample; default `SamplingParams()`.
            return_exceptions: with a list, put a failed prompt's error in its place and go on. Otherwise nothing new
                is sent after a failure, and the first failed prompt's error is raised, with its `prompt_index`, once
                nothing is in flight any more.
            timeout: seconds for each request, in place of the client's.
            **sampling: fields of `SamplingParams`, over those of `params`.

        Raises:
            TritonLlamaError: see `triton_llama.errors` for which.
        """
        chosen = (params or SamplingParams()).with_options(**sampling)
        seconds = self._limits.request_timeout(timeout)
        if isinstance(prompt, str):
            return self._transport.infer(self.model, prepare(prompt, chosen), seconds)
        many = ManyRequests(prompt, chosen, keep_errors=return_exceptions)
        self._run(many, seconds)
        outcomes = many.outcomes()
        return outcomes if return_exceptions else cast("list[Completion]", outcomes)

    def stream(
        self,
        prompt: str,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> CompletionStream:
        """Complete a prompt piece by piece, as the server generates it; it must serve the config `streaming`.

            with client.stream("A list comprehension", max_tokens=40) as stream:
                for piece in stream:
                    print(piece.text, end="", flush=True)

        Nothing is sent before the first piece is asked for. The arguments are those of `generate`; any number of
        streams may run on one client, each in its own thread. Leaving the block early cancels the request.

        Raises:
            RejectedInputError: a value no tensor can hold. Every other error, this one included, may come from the
                stream, before its first piece or after any: the ones of `generate`. A stream that ends without an
                error is whole.
        """
        chosen = (params or SamplingParams()).with_options(**sampling)
        seconds = self._limits.request_timeout(timeout)
        request = prepare(prompt, chosen, stream=True)
        return CompletionStream(self._transport.stream(self.model, request, seconds), request)

    def status(self, *, timeout: float | None = None) -> ServerStatus:
        """Ask the server for its state, the model's and its live configuration.

        `timeout` is for each of the five questions, in seconds. A server that is up but not ready is an answer, not an
        error.

        Raises:
            TritonLlamaError: no server answers there.
        """
        answers = self._transport.status(self.model, self._limits.request_timeout(timeout))
        return read_status(self.endpoint, self.model, answers)

    def close(self) -> None:
        """Close the connections; requests and streams in flight in other threads end with a LlamaConnectionError."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, many: ManyRequests, timeout: float) -> None:
        workers = min(len(many), self._limits.concurrency)
        if not workers:
            return
        executor = ThreadPoolExecutor(workers, thread_name_prefix="triton-llama")
        try:
            for future in [executor.submit(self._work, many, timeout) for _ in range(workers)]:
                future.result()
        finally:
            # After Ctrl-C, don't wait for what is in flight: closing the client ends it.
            many.stop()
            executor.shutdown(wait=False)

    def _work(self, many: ManyRequests, timeout: float) -> None:
        while (next_one := many.take()) is not None:
            index, request = next_one
            try:
                many.record(index, self._transport.infer(self.model, request, timeout))
            except TritonLlamaError as error:
                many.record(index, error)


def _open_transport(server: Endpoint, connect_timeout: float, headers: Mapping[str, str]) -> Transport:
    # Imported when needed: each brings a large library, and nobody needs both.
    if server.protocol == "grpc":
        from triton_llama.grpc_transport import GrpcTransport

        return GrpcTransport(server, connect_timeout, headers)
    from triton_llama.http_transport import HttpTransport

    return HttpTransport(server, connect_timeout, headers)
