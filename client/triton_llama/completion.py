"""Completions: the whole answer to a prompt, its chunks while it is being generated, and streams of these chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, field, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from triton_llama.errors import ServerError

TokenLogprobs = dict[str, dict[str, object]]
"""Token id → logprob, rank, decoded_token, bytes if not the text's; the token of the text first, then the likeliest."""


@dataclass(frozen=True, slots=True)
class Times:
    """The times of a completion on its server, in nanoseconds since 1970."""

    arrival: int
    """When the model got the request; a wait in Triton's queue comes before."""
    first_scheduled: int
    """When the completion got its slot."""
    first_token: int
    last_token: int


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt."""

    text: str
    """The completion alone, or prompt and completion with `exclude_input_in_output=False`."""
    finish_reason: str
    """`stop` (end token, stop token or stop string) or `length` (`max_tokens` reached)."""
    num_input_tokens: int
    """Tokens of the prompt."""
    num_output_tokens: int
    """Tokens generated."""
    request_id: str
    """The request's id, in the server's log too."""
    seed: int
    """The seed sent, drawn by the client if the caller gave none: with it the same request gives the same text."""
    num_cached_tokens: int | None = None
    """Tokens of the prompt that were in the KV cache already; None if the server doesn't report them."""
    num_accepted_draft_tokens: int | None = None
    """Generated tokens that a draft had predicted; None if the server doesn't report them."""
    num_rejected_draft_tokens: int | None = None
    """Tokens of drafts that were not generated; None if the server doesn't report them."""
    embedding: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    """That of the prompt, [size], if the request is for one; the text is then empty."""
    times: Times | None = None
    """For a request with `return_perf_metrics`, else None."""

    @classmethod
    def of(cls, chunk: Chunk, request_id: str, seed: int) -> Completion:
        """Return the completion whose only chunk is this one."""
        shared = {field.name for field in fields(cls)} - {"request_id", "seed"}
        return cls(request_id=request_id, seed=seed, **{name: getattr(chunk, name) for name in shared})


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a completion: the text generated since the chunk before; `str()` of it is that text."""

    text: str
    """The text of one or several tokens; whole characters only, possibly empty in the last chunk."""
    finish_reason: str
    """Empty until the last chunk; then as in `Completion`."""
    num_input_tokens: int
    """Tokens of the prompt, the same in every chunk."""
    num_output_tokens: int
    """Tokens generated since the chunk before; the sum over all chunks is the completion's."""
    num_cached_tokens: int | None = None
    """As in `Completion`, in the last chunk; None before."""
    num_accepted_draft_tokens: int | None = None
    """As in `Completion`, in the last chunk; None before."""
    num_rejected_draft_tokens: int | None = None
    """As in `Completion`, in the last chunk; None before."""
    index: int = 0
    """Index of the completion, of a request with several."""
    stop_reason: str = ""
    """The stop string, the decimal id of the stop token, or empty."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Of the prompt's tokens; None for the first one, which has none. In the first chunk of a request with them."""
    output_ids: tuple[int, ...] = ()
    """The chunk's own tokens."""
    seed: int | None = None
    """The completion's own."""
    embedding: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    """As in `Completion`."""
    times: Times | None = None
    """As in `Completion`, in the last chunk; None before."""

    def __str__(self) -> str:
        return self.text


class _Stream:
    """The chunks so far."""

    def __init__(self, request_id: str, seed: int) -> None:
        self.request_id = request_id
        """The request's id, in the server's log too."""
        self.seed = seed
        """The seed sent: with it the same request gives the same text."""
        self._texts: list[str] = []
        self._num_output_tokens = 0
        self._last: Chunk | None = None
        self._closed = False

    @property
    def text(self) -> str:
        """The text so far; complete once the stream has ended."""
        return "".join(self._texts)

    @property
    def completion(self) -> Completion:
        """All chunks as one completion.

        Raises:
            RuntimeError: the last chunk hasn't come, or the stream was closed before it.
        """
        if self._last is None:
            raise RuntimeError("a stream has no completion before its last chunk")
        whole = replace(self._last, text=self.text, num_output_tokens=self._num_output_tokens)
        return Completion.of(whole, self.request_id, self.seed)

    def _add(self, chunk: Chunk) -> Chunk:
        self._texts.append(chunk.text)
        self._num_output_tokens += chunk.num_output_tokens
        if chunk.finish_reason:
            self._last = chunk
        return chunk

    def _check_end(self) -> None:
        # Without a last chunk the text may be cut off anywhere.
        if self._last is None and not self._closed:
            raise ServerError(f"the stream ended after {len(self._texts)} chunks without a finish_reason")


class CompletionStream(_Stream):
    """An iterator over the chunks of one completion, for one thread.

        with client.stream("A list comprehension", max_tokens=40) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print(stream.completion.finish_reason)

    The first `next` sends the request. Leaving the `with` block before the last chunk cancels the request on the
    server; so does `close`, and dropping the last reference to the stream.
    """

    def __init__(self, chunks: Generator[Chunk, None, None], request_id: str, seed: int) -> None:
        super().__init__(request_id, seed)
        self._chunks = chunks

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            return self._add(next(self._chunks))
        except StopIteration:
            self._check_end()
            raise

    def close(self) -> None:
        """Take no more chunks; unless the last one has come, cancel the request on the server."""
        self._closed = True
        self._chunks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncCompletionStream(_Stream):
    """`CompletionStream` in asyncio: `async with`, `async for`, `await stream.close()`."""

    def __init__(self, chunks: AsyncGenerator[Chunk, None], request_id: str, seed: int) -> None:
        super().__init__(request_id, seed)
        self._chunks = chunks

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        try:
            return self._add(await anext(self._chunks))
        except StopAsyncIteration:
            self._check_end()
            raise

    async def close(self) -> None:
        """Take no more chunks; unless the last one has come, cancel the request on the server."""
        self._closed = True
        await self._chunks.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
