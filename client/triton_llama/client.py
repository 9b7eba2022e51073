"""The synchronous client: one prompt or a list in, completions out. A transport speaks the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, Literal, Self, TypeVar, Unpack, cast, overload

from triton_llama.completion import Completion, CompletionStream
from triton_llama.endpoint import Endpoint, Protocol, check_headers, check_seconds
from triton_llama.errors import RejectedInputError, TritonLlamaError
from triton_llama.sampling_params import Options, SamplingOptions, SamplingParams
from triton_llama.status import ServerStatus
from triton_llama.tensors import PreparedRequest, prepare
from triton_llama.translate import DecoupledModelError

if TYPE_CHECKING:
    from triton_llama.grpc_transport import GrpcTransport
    from triton_llama.http_transport import HttpTransport

Prompts = list[str] | tuple[str, ...]
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
        concurrency: int = 32,
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
            connect_timeout: seconds of it for making a connection.
            concurrency: requests of one list of prompts in flight at most; the number of streams is unlimited.
            headers: sent with every request (an `Authorization` for a gateway, say).

        Raises:
            ValueError: a malformed URL, an unknown protocol, a timeout or concurrency that isn't positive, a header
                that the protocol can't carry.
        """
        self.endpoint = Endpoint.parse(url, protocol)
        self.model = model
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}, must be at least 1")
        self._concurrency = concurrency
        self._timeout = check_seconds("timeout", timeout)
        check_seconds("connect_timeout", connect_timeout)
        self._transport = self._open(connect_timeout, check_headers(headers or {}, protocol))
        # Set at the first refusal of a streaming (decoupled) model. Streams take every model, but over HTTP they carry
        # no status for errors, so they aren't the first choice.
        self._decoupled = False

    def _open(self, connect_timeout: float, headers: Mapping[str, str]) -> TransportT:
        raise NotImplementedError

    def _choose(
        self, params: SamplingParams | None, timeout: float | None = None, **sampling: Unpack[SamplingOptions]
    ) -> tuple[SamplingParams, float]:
        """Return the parameters and the timeout of one request."""
        return (params or SamplingParams()).with_options(**sampling), self._seconds(timeout)

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else check_seconds("timeout", timeout)


def prepare_all(
    prompts: Sequence[str], params: SamplingParams, *, keep_errors: bool
) -> list[PreparedRequest | RejectedInputError]:
    """Prepare the requests of a list of prompts, or put the error of one that can't be sent in its place.

    Raises:
        RejectedInputError: a prompt can't be sent, unless `keep_errors`.
    """
    requests: list[PreparedRequest | RejectedInputError] = []
    for index, prompt in enumerate(prompts):
        try:
            requests.append(prepare(prompt, params))
        except RejectedInputError as error:
            error.prompt_index = index
            if not keep_errors:
                raise
            requests.append(error)
    return requests


class LlamaClient(BaseClient["HttpTransport | GrpcTransport"]):
    """A client of one model on one server; threads may share it.

        with LlamaClient("localhost:8000") as client:
            print(client.generate("A list comprehension", max_tokens=40).text)

    It never retries. Create it after a fork, not before: processes can't share connections.
    """

    @overload
    def generate(self, prompt: str, params: SamplingParams | None = None, **options: Unpack[Options]) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: Prompts,
        params: SamplingParams | None = None,
        *,
        return_exceptions: Literal[False] = False,
        **options: Unpack[Options],
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompt: Prompts,
        params: SamplingParams | None = None,
        *,
        return_exceptions: Literal[True],
        **options: Unpack[Options],
    ) -> list[Completion | TritonLlamaError]: ...

    def generate(
        self,
        prompt: str | Sequence[str],
        params: SamplingParams | None = None,
        *,
        return_exceptions: bool = False,
        **options: Unpack[Options],
    ) -> Completion | list[Completion] | list[Completion | TritonLlamaError]:
        """Complete a prompt, or each prompt of a list.

        A list is sent as one request for each prompt, `concurrency` of them at a time, so that Triton forms the
        batches; the completions are in the order of the prompts.

        Args:
            prompt: one prompt, or a list or tuple of them.
            params: how to sample; default `SamplingParams()`.
            return_exceptions: with a list, put a failed prompt's error in its place and go on. Otherwise the error of
                the first failed prompt is raised, with its `prompt_index`, and prompts that wait are not sent.
            **options: fields of `SamplingParams`, over those of `params`; and `timeout`, seconds for each request, in
                place of the client's.

        Raises:
            TritonLlamaError: `triton_llama.errors` lists which.
        """
        chosen, seconds = self._choose(params, **options)
        if isinstance(prompt, str):
            return self._infer(prepare(prompt, chosen), seconds)
        outcomes = self._send(prepare_all(prompt, chosen, keep_errors=return_exceptions), seconds, return_exceptions)
        return outcomes if return_exceptions else cast("list[Completion]", outcomes)

    def stream(self, prompt: str, params: SamplingParams | None = None, **options: Unpack[Options]) -> CompletionStream:
        """Complete a prompt chunk by chunk, as the server generates it; it must serve the config `streaming`.

            with client.stream("A list comprehension", max_tokens=40) as stream:
                for chunk in stream:
                    print(chunk.text, end="", flush=True)

        The first `next` sends the request. The arguments are those of `generate`; one client can run any number of
        streams, each in its own thread. Leaving the block early cancels the request.

        Raises:
            RejectedInputError: a value no tensor can hold. The stream raises all other errors of `generate`, before its
                first chunk or after any. A stream that ends without an error is complete.
        """
        chosen, seconds = self._choose(params, **options)
        request = prepare(prompt, chosen, stream=True)
        return CompletionStream(self._transport.stream(self.model, request, seconds), request)

    def status(self, *, timeout: float | None = None) -> ServerStatus:
        """Ask for the state of the server, of the model, and for its live configuration.

        `timeout` is for each of the five questions, in seconds. A server that is up but not ready is an answer, not an
        error.

        Raises:
            TritonLlamaError: no server answers there.
        """
        return self._transport.status(self.model, self._seconds(timeout))

    def close(self) -> None:
        """Close the connections. Over gRPC, requests in flight in other threads end with a LlamaConnectionError.

        Over HTTP a thread that waits for an answer goes on waiting, its timeout at most.
        """
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _infer(self, request: PreparedRequest, timeout: float) -> Completion:
        if not self._decoupled:
            try:
                return self._transport.infer(self.model, request, timeout)
            except DecoupledModelError:
                self._decoupled = True
        with CompletionStream(self._transport.stream(self.model, request, timeout), request) as stream:
            for _ in stream:
                pass
        return stream.completion

    def _send(
        self, requests: Sequence[PreparedRequest | RejectedInputError], timeout: float, keep_errors: bool
    ) -> list[Completion | TritonLlamaError]:
        def outcome(index: int, request: PreparedRequest | RejectedInputError) -> Completion | TritonLlamaError:
            if isinstance(request, RejectedInputError):
                return request
            try:
                return self._infer(request, timeout)
            except TritonLlamaError as error:
                error.prompt_index = index
                if keep_errors:
                    return error
                raise

        executor = ThreadPoolExecutor(self._concurrency, thread_name_prefix="triton-llama")
        try:
            return list(executor.map(outcome, range(len(requests)), requests))
        except TritonLlamaError:
            executor.shutdown(cancel_futures=True)
            raise
        finally:
            # After Ctrl-C, don't wait for requests in flight.
            executor.shutdown(wait=False, cancel_futures=True)

    def _open(self, connect_timeout: float, headers: Mapping[str, str]) -> HttpTransport | GrpcTransport:
        # Imported here: each brings a large library, and a client needs one of them.
        if self.endpoint.protocol == "grpc":
            from triton_llama.grpc_transport import GrpcTransport

            return GrpcTransport(self.endpoint, connect_timeout, headers)
        from triton_llama.http_transport import HttpTransport

        return HttpTransport(self.endpoint, connect_timeout, headers)
