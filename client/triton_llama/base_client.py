"""The arguments and the requests of both clients; a transport speaks the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, Unpack, cast, overload

from triton_llama import endpoint
from triton_llama.completion import AsyncCompletionStream, Completion, Piece
from triton_llama.endpoint import Endpoint, check_headers, check_seconds
from triton_llama.errors import RejectedInputError, TritonLlamaError
from triton_llama.sampling_params import Options, SamplingOptions, SamplingParams
from triton_llama.tensors import PreparedRequest, prepare

if TYPE_CHECKING:
    from triton_llama.grpc_transport import GrpcTransport
    from triton_llama.http_transport import HttpTransport

Prompts = list[str] | tuple[str, ...]
Outcome = Completion | TritonLlamaError
# Results of `generate` (for one prompt, for a list, for a list with errors) and of `status`, or coroutines of them.
OneT = TypeVar("OneT")
ListT = TypeVar("ListT")
MixedT = TypeVar("MixedT")
StatusT = TypeVar("StatusT")


class BaseClient(Generic[OneT, ListT, MixedT, StatusT]):
    """A client of one model on one server; it never retries. Requests are coroutines, which the clients run."""

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
        """Check the arguments; the first request connects.

        Args:
            url: `HOST:PORT`, or with a scheme: `http://`, `https://`, `grpc://`, `grpcs://`.
            protocol: `http` or `grpc`.
            model: the model's name in the repository.
            timeout: seconds for one request, from connecting to the last byte; for a stream, to its last piece, the
                caller's own time between pieces included. After it, the request is cancelled on the server, except one
                over HTTP that isn't a stream: the server completes its text.
            connect_timeout: seconds of it for making a connection.
            concurrency: requests of one list of prompts in flight at most; the number of streams is unlimited.
            headers: sent with every request (an `Authorization` for a gateway, say).

        Raises:
            ValueError: a malformed URL, an unknown protocol, a timeout or concurrency that isn't positive, a header
                that the protocol can't carry.
        """
        self.endpoint = Endpoint.parse(url, protocol)
        self.model = model
        self._timeout = check_seconds("timeout", timeout)
        self._concurrency = concurrency
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}, must be at least 1")
        self._transport = _open_transport(
            self.endpoint, check_seconds("connect_timeout", connect_timeout), check_headers(headers or {}, protocol)
        )
        # Set at the first refusal of a streaming (decoupled) model. Streams take every model, but over HTTP they carry
        # no status for errors, so they aren't the first choice.
        self._decoupled = False
        self._opened()

    def _opened(self) -> None:
        """Prepare to run requests; the arguments have been checked."""

    def _run(self, request: Coroutine[object, object, object]) -> object:
        """Return the request's result, or a coroutine of it."""
        raise NotImplementedError

    @overload
    def generate(self, prompt: str, params: SamplingParams | None = None, **options: Unpack[Options]) -> OneT: ...

    @overload
    def generate(
        self,
        prompt: Prompts,
        params: SamplingParams | None = None,
        *,
        return_exceptions: Literal[False] = False,
        **options: Unpack[Options],
    ) -> ListT: ...

    @overload
    def generate(
        self,
        prompt: Prompts,
        params: SamplingParams | None = None,
        *,
        return_exceptions: Literal[True],
        **options: Unpack[Options],
    ) -> MixedT: ...

    def generate(
        self,
        prompt: str | Sequence[str],
        params: SamplingParams | None = None,
        *,
        return_exceptions: bool = False,
        **options: Unpack[Options],
    ) -> OneT | ListT | MixedT:
        """Complete a prompt, or each prompt of a list.

        A list is sent as one request for each prompt, `concurrency` of them at a time, so that Triton forms the
        batches; the completions are in the order of the prompts.

        Args:
            prompt: one prompt, or a list or tuple of them.
            params: how to sample; default `SamplingParams()`.
            return_exceptions: with a list, put a failed prompt's error in its place and go on. Otherwise a failure
                stops the sending, and once no request is in flight the first failed prompt's error is raised, with its
                `prompt_index`.
            **options: fields of `SamplingParams`, over those of `params`; and `timeout`, seconds for each request, in
                place of the client's.

        Raises:
            TritonLlamaError: `triton_llama.errors` lists which.
        """
        return cast("OneT | ListT | MixedT", self._run(self._complete(prompt, params, return_exceptions, options)))

    def status(self, *, timeout: float | None = None) -> StatusT:
        """Ask for the state of the server, of the model, and for its live configuration.

        `timeout` is for each of the five questions, in seconds. A server that is up but not ready is an answer, not an
        error.

        Raises:
            TritonLlamaError: no server answers there.
        """
        return cast("StatusT", self._run(self._transport.status(self.model, self._request_timeout(timeout))))

    async def _complete(
        self, prompt: str | Sequence[str], params: SamplingParams | None, return_exceptions: bool, options: Options
    ) -> Completion | list[Completion] | list[Outcome]:
        chosen, seconds = self._choose(params, **options)
        if isinstance(prompt, str):
            return await self._infer(prepare(prompt, chosen), seconds)
        outcomes = await self._infer_each(prompt, chosen, seconds, keep_errors=return_exceptions)
        if not return_exceptions:
            for outcome in outcomes:
                if isinstance(outcome, TritonLlamaError):
                    raise outcome
        return outcomes

    def _choose(
        self, params: SamplingParams | None, timeout: float | None = None, **sampling: Unpack[SamplingOptions]
    ) -> tuple[SamplingParams, float]:
        """Return the parameters and the timeout of one request."""
        return (params or SamplingParams()).with_options(**sampling), self._request_timeout(timeout)

    def _request_timeout(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else check_seconds("timeout", timeout)

    def _stream(
        self, prompt: str, params: SamplingParams | None, options: Options
    ) -> tuple[AsyncGenerator[Piece, None], PreparedRequest]:
        chosen, seconds = self._choose(params, **options)
        request = prepare(prompt, chosen, stream=True)
        return self._transport.stream(self.model, request, seconds), request

    async def _infer(self, request: PreparedRequest, timeout: float) -> Completion:
        if not self._decoupled:
            completion = await self._transport.infer(self.model, request, timeout)
            if completion is not None:
                return completion
            self._decoupled = True
        pieces = self._transport.stream(self.model, request, timeout)
        async with AsyncCompletionStream(pieces, request) as stream:
            async for _ in stream:
                pass
        return stream.completion

    async def _infer_each(
        self, prompts: Sequence[str], params: SamplingParams, timeout: float, *, keep_errors: bool
    ) -> list[Outcome]:
        """Return the outcomes in the prompts' order; unless `keep_errors`, those of the requests before a failure."""
        requests: list[PreparedRequest | RejectedInputError] = []
        for index, prompt in enumerate(prompts):
            try:
                requests.append(prepare(prompt, params))
            except RejectedInputError as error:
                error.prompt_index = index
                if not keep_errors:
                    # Before anything is sent, so the whole list is refused at once.
                    raise
                requests.append(error)
        slots = asyncio.Semaphore(self._concurrency)
        stopped = False

        async def infer(index: int, request: PreparedRequest | RejectedInputError) -> Outcome | None:
            nonlocal stopped
            async with slots:
                if stopped:
                    return None
                if isinstance(request, RejectedInputError):
                    return request
                try:
                    return await self._infer(request, timeout)
                except TritonLlamaError as error:
                    error.prompt_index = index
                    stopped = not keep_errors
                    return error

        outcomes = await asyncio.gather(*(infer(index, request) for index, request in enumerate(requests)))
        return [outcome for outcome in outcomes if outcome is not None]


def _open_transport(
    endpoint: Endpoint, connect_timeout: float, headers: Mapping[str, str]
) -> HttpTransport | GrpcTransport:
    # Imported here: each brings a large library, and a client needs one of them.
    if endpoint.protocol == "grpc":
        from triton_llama.grpc_transport import GrpcTransport

        return GrpcTransport(endpoint, connect_timeout, headers)
    from triton_llama.http_transport import HttpTransport

    return HttpTransport(endpoint, connect_timeout, headers)
