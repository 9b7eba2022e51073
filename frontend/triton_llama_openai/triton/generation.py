"""A client's request: a Triton request for each prompt, all at the same time, their chunks and token counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from triton_llama.completion import Chunk

from triton_llama_openai.errors import invalid
from triton_llama_openai.guides.structured_output import Guide
from triton_llama_openai.protocol.prompts import Prompt
from triton_llama_openai.protocol.sampling import SamplingRequest
from triton_llama_openai.record import RequestRecord
from triton_llama_openai.settings import Settings
from triton_llama_openai.triton.inputs import inputs_of, with_api_errors
from triton_llama_openai.triton.merge import ChunkStream, merge
from triton_llama_openai.triton.resumption import Resumption, TritonRequest
from triton_llama_openai.triton.shared_prefixes import cache_salt_of, replica_key
from triton_llama_openai.triton.triton_client import OUTPUTS, OUTPUTS_OF_ONE
from triton_llama_openai.triton.usage import Usage

if TYPE_CHECKING:
    from triton_llama_openai.output.output_parser import OutputParser
    from triton_llama_openai.served.served_model import ServedModel

MAX_PROMPT_LOGPROBS = 1 << 19
"""Maximum log probabilities of prompts in one response: prompt tokens x completions x (alternatives + 1)."""

_UNARY_INTERVAL_MS = 1000
"""Between two chunks of an answer that isn't streamed to the client: few responses, and little to compute again."""


class Generation:
    """Runs the prompts of one request in Triton, all at the same time.

    usage: token counts so far. timeout: seconds for all prompts. record: the request's metrics, which get the counts.

    Raises:
        ApiError: more log probabilities of prompts than one answer may have.
    """

    def __init__(
        self,
        request: SamplingRequest,
        prompts: Sequence[Prompt],
        guide: Guide | None,
        model: ServedModel,
        settings: Settings,
        record: RequestRecord,
    ) -> None:
        _check_prompt_logprobs(request, prompts, model.tokenizer.context)
        self.request = request
        self.usage = Usage(request.choices)
        self.timeout = settings.request_timeout
        self.record = record
        self._triton = model.triton
        self._parsers: dict[int, OutputParser] = {}
        shared = settings.prefix_cache_shared == "on"
        cache_salt = cache_salt_of(b"" if shared else record.key_digest, request.cache_salt)
        interval = settings.stream_interval_ms if request.streamed else _UNARY_INTERVAL_MS
        self._requests = [
            TritonRequest(
                id=record.id if len(prompts) == 1 else f"{record.id}-{number}",
                tensors=inputs_of(request, prompt, guide, model, interval, cache_salt),
                outputs=OUTPUTS if request.choices > 1 else OUTPUTS_OF_ONE,
                choices=range(number * request.choices, (number + 1) * request.choices),
                key=replica_key(record.session, request.prompt_cache_key, prompt, record.adapter, cache_salt),
                timeout=settings.request_timeout,
                resume_timeout=settings.resume_timeout,
                streamed=request.streamed,
            )
            for number, prompt in enumerate(prompts)
        ]
        self._fields = {**request.input_fields(), "lora_name": "model"}
        if guide is not None:
            record.ignored += guide.ignored
            self._fields |= {"guided_decoding_guide": guide.field, "guided_decoding_guide_type": guide.field}

    def end_with(self, new_parser: Callable[[], OutputParser]) -> None:
        """End each choice where a parser of its own says that its output ends."""
        # The answer's own parsers may find the end too late: without a stream they parse the answer once it is whole.
        self._parsers = {index: new_parser() for index in range(self.request.choices)}

    def stream(self) -> ChunkStream:
        """Return the chunks of all prompts, for the caller to `count`. One prompt's error ends all. Raises ApiError."""
        stream = merge([self._stream(number) for number in range(len(self._requests))])
        if self._parsers:
            stream = until_ended(stream, self._parsers)
        return _without_output(stream) if self.request.max_new_tokens == 0 else stream

    def _stream(self, number: int) -> ChunkStream:
        resumed = Resumption(self._requests[number], self._triton, self.record).chunks()
        return with_api_errors(resumed, self._fields, number, len(self._requests))

    def count(self, chunks: Sequence[Chunk]) -> None:
        """Count the tokens of chunks."""
        self.usage.add(chunks)
        self.record.prompt_tokens = self.usage.prompt_tokens
        self.record.completion_tokens = self.usage.completion_tokens
        self.record.finish_reasons += [chunk.finish_reason for chunk in chunks if chunk.finish_reason]
        if self.request.streamed and any(chunk.num_output_tokens for chunk in chunks):
            self.record.saw_text()

    def counts(self) -> dict[str, object]:
        """Return the fields that an answer ends with: `usage`, and `timings` for a request with them."""
        return {"usage": self.usage.body(), **self.timings()}

    def timings(self) -> dict[str, object]:
        """Return the field `timings` of an answer at its end, for a request with it.

        It is null for an answer that was resumed: the times are those of the last Triton alone.
        """
        if not self.request.timings:
            return {}
        elapsed_ms = (time.perf_counter() - self.record.arrived) * 1000
        return {"timings": None if self.record.interruptions else self.usage.timings(elapsed_ms)}

    async def whole(self) -> list[Chunk]:
        """Send the request and wait for its end; return each choice as one chunk, in order. Raises ApiError."""
        of_choices: dict[int, list[Chunk]] = {}
        async with aclosing(self.stream()) as stream:
            async for chunks in stream:
                self.count(chunks)
                for chunk in chunks:
                    of_choices.setdefault(chunk.index, []).append(chunk)
        return [_joined(of_choices[index]) for index in sorted(of_choices)]


async def until_ended(stream: ChunkStream, parsers: dict[int, OutputParser]) -> ChunkStream:
    """Yield the chunks of each choice up to the one in which its output ends. parsers: of the running choices."""
    async with aclosing(stream):
        async for chunks in stream:
            running = []
            for chunk in chunks:
                if parser := parsers.get(chunk.index):
                    parser.parse(chunk)
                    if parser.ended or chunk.finish_reason:
                        del parsers[chunk.index]
                    running.append(replace(chunk, finish_reason="stop") if parser.ended else chunk)
            yield running
            if not parsers:
                return


async def _without_output(stream: ChunkStream) -> ChunkStream:
    """Yield the chunks, each a choice's only one, without the token that the model has generated."""
    async with aclosing(stream):
        async for chunks in stream:
            yield [_without_token(chunk) for chunk in chunks]


def _without_token(chunk: Chunk) -> Chunk:
    return replace(
        chunk, text="", num_output_tokens=0, logprobs=[], output_ids=(), finish_reason="length", stop_reason=""
    )


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    """Return the chunks of a choice as one; the reasons, cached tokens and tokens of drafts are the last one's."""
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        num_output_tokens=sum(chunk.num_output_tokens for chunk in chunks),
        logprobs=[token for chunk in chunks for token in chunk.logprobs],
        prompt_logprobs=chunks[0].prompt_logprobs,
        output_ids=tuple(token for chunk in chunks for token in chunk.output_ids),
    )


def _check_prompt_logprobs(request: SamplingRequest, prompts: Sequence[Prompt], context: int) -> None:
    top = request.num_prompt_logprobs
    if top is None:
        return
    # A text has no more tokens than bytes.
    sizes = [len(prompt.encode() if isinstance(prompt, str) else prompt) for prompt in prompts]
    count = sum(min(size, context) for size in sizes) * request.choices * (top + 1)
    if count > MAX_PROMPT_LOGPROBS:
        name = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        value = f"up to {count} log probabilities of the prompts' tokens"
        raise invalid(name, value, f"at most {MAX_PROMPT_LOGPROBS} in one request")
