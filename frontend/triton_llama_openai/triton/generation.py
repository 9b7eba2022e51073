"""One request in the engine: the chunks of its prompts, which run in parallel, and its token counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from triton_llama.completion import Chunk
from triton_llama.errors import TritonLlamaError

from triton_llama_openai.errors import from_engine, invalid
from triton_llama_openai.middleware import RequestRecord
from triton_llama_openai.protocol.sampling import SamplingRequest
from triton_llama_openai.settings import Settings
from triton_llama_openai.triton.inputs import Prompt, cache_salt_of, inputs_of, replica_key
from triton_llama_openai.triton.resumption import ChunkStream, EngineRequest, Resumption, merge

if TYPE_CHECKING:
    from triton_llama_openai.output.output_parser import OutputParser
    from triton_llama_openai.output.structured_output import Guide
    from triton_llama_openai.prompt.tokenizer import Checkpoint
    from triton_llama_openai.routes.served_model import ServedModel

MAX_PROMPT_LOGPROBS = 1 << 19
"""Maximum log probabilities of prompts in one response: prompt tokens x completions x (alternatives + 1)."""

_UNARY_INTERVAL_MS = 1000
"""Between two chunks of an answer that isn't streamed to the client: few responses, and little to compute again."""


class Generation:
    """Runs the prompts of one request in the engine, all at the same time.

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
        _check_prompt_logprobs(request, prompts, model.checkpoint.context)
        self.request = request
        self.usage = Usage(request.choices)
        self.timeout = settings.request_timeout
        self.record = record
        self._engine = model.engine
        record.model = model.name
        record.adapter = "" if model.adapter is None else model.adapter.name
        self._parsers: dict[int, OutputParser] = {}
        shared = settings.prefix_cache_shared == "on"
        cache_salt = cache_salt_of(b"" if shared else record.key_digest, request.cache_salt)
        interval = settings.stream_interval_ms if request.streamed else _UNARY_INTERVAL_MS
        self._requests = [
            EngineRequest(
                record.id if len(prompts) == 1 else f"{record.id}-{number}",
                inputs_of(request, prompt, guide, model, interval, cache_salt),
                range(number * request.choices, (number + 1) * request.choices),
                replica_key(record.session or request.prompt_cache_key or "", prompt, record.adapter, cache_salt),
                settings.request_timeout,
                settings.resume_timeout,
                request.streamed,
            )
            for number, prompt in enumerate(prompts)
        ]
        self._fields = {**request.engine_fields(), "lora_name": "model"}
        if guide is not None:
            record.ignored += guide.ignored
            self._fields |= {"guided_decoding_guide": guide.field, "guided_decoding_guide_type": guide.field}

    def end_with(self, new_parser: Callable[[], OutputParser]) -> None:
        """End each choice where a parser of its own says that its output ends."""
        self._parsers = {index: new_parser() for index in range(self.request.choices)}

    def stream(self) -> ChunkStream:
        """Return the chunks of all prompts; one prompt's error ends all. Read it within `errors`, and `count` them."""
        responses = merge([Resumption(request, self._engine, self.record).chunks() for request in self._requests])
        if self._parsers:
            responses = until_ended(responses, self._parsers)
        return _without_output(responses) if self.request.max_new_tokens == 0 else responses

    def count(self, chunks: Sequence[Chunk]) -> None:
        """Count the tokens of a response."""
        self.usage.add(chunks)
        self.record.prompt_tokens = self.usage.prompt_tokens
        self.record.completion_tokens = self.usage.completion_tokens
        self.record.finish_reasons += [chunk.finish_reason for chunk in chunks if chunk.finish_reason]
        if self.request.streamed and any(chunk.num_output_tokens for chunk in chunks):
            self.record.saw_text()

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise the engine's errors in the block as ApiErrors, in this request's words."""
        try:
            yield
        except TritonLlamaError as error:
            raise from_engine(error, self._fields) from error

    async def whole(self) -> list[Chunk]:
        """Send the request and wait for its end; return each choice as one chunk, in order. Raises ApiError."""
        of_choices: dict[int, list[Chunk]] = {}
        with self.errors():
            async with aclosing(self.stream()) as responses:
                async for response in responses:
                    self.count(response)
                    for chunk in response:
                        of_choices.setdefault(chunk.index, []).append(chunk)
        return [_joined(of_choices[index]) for index in sorted(of_choices)]


async def until_ended(responses: ChunkStream, parsers: dict[int, OutputParser]) -> ChunkStream:
    """Yield the chunks of each choice up to the one in which its output ends. parsers: of the running choices."""
    async with aclosing(responses):
        async for chunks in responses:
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


async def _without_output(responses: ChunkStream) -> ChunkStream:
    """Yield the chunks, each a choice's only one, without the token that the model has generated."""
    async with aclosing(responses):
        async for chunks in responses:
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


@dataclass
class Usage:
    """Tokens of a request so far. A prompt counts once, however many completions (`choices_per_prompt`) it has.

    reasoning_tokens: those of all choices' reasoning, None as long as they aren't counted. accepted_prediction_tokens,
    rejected_prediction_tokens: those of all choices' drafts, None as long as the server doesn't say.
    """

    choices_per_prompt: int
    completion_tokens: int = 0
    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    _prompts: dict[int, int] = field(default_factory=dict)
    _cached: dict[int, int] = field(default_factory=dict)

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Count the tokens of a response."""
        for chunk in chunks:
            prompt = chunk.index // self.choices_per_prompt
            self.completion_tokens += chunk.num_output_tokens
            self._prompts[prompt] = max(self._prompts.get(prompt, 0), chunk.num_input_tokens)
            if chunk.num_cached_tokens is not None:
                # That of the choice which found least: the others also find what it has computed.
                cached = self._cached.get(prompt, chunk.num_cached_tokens)
                self._cached[prompt] = min(cached, chunk.num_cached_tokens)
            if (accepted := chunk.num_accepted_draft_tokens) is not None:
                self.accepted_prediction_tokens = accepted + (self.accepted_prediction_tokens or 0)
            if (rejected := chunk.num_rejected_draft_tokens) is not None:
                self.rejected_prediction_tokens = rejected + (self.rejected_prediction_tokens or 0)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self._prompts.values())

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of all prompts that were cached, None as long as the server doesn't say."""
        return sum(self._cached.values()) if self._cached else None

    def body(self, *, before_text: bool = False) -> dict[str, object]:
        """Return the answer's `usage`; without details that the server doesn't say or that aren't counted.

        before_text: True for events sent before the first token; reports 0 completion tokens.
        """
        completion_tokens = 0 if before_text else self.completion_tokens
        counts: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        }
        if self.cached_tokens is not None:
            counts["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        details = {
            "reasoning_tokens": self.reasoning_tokens,
            "accepted_prediction_tokens": self.accepted_prediction_tokens,
            "rejected_prediction_tokens": self.rejected_prediction_tokens,
        }
        if known := {name: count for name, count in details.items() if count is not None}:
            counts["completion_tokens_details"] = known
        return counts


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


def truncate(request: SamplingRequest, prompts: Sequence[Prompt], checkpoint: Checkpoint) -> list[Prompt]:
    """Return the prompts, of longer ones the last tokens, as `truncate_prompt_tokens` says. It tokenizes texts.

    As under vLLM, a BOS that is cut off isn't added again.

    Raises:
        ApiError: the request keeps more tokens than the context has room for.
    """
    count, room = request.truncate_prompt_tokens, checkpoint.context - 1
    if count is None:
        return list(prompts)
    if count > room:
        raise invalid("truncate_prompt_tokens", count, f"-1, or 1 … {room} (max_model_len - 1)")
    if count < 0:
        maximum = request.DEFAULT_MAX_TOKENS if request.max_new_tokens is None else request.max_new_tokens
        new_tokens = maximum or 1
        # With more new tokens than the context has, max_tokens is refused or reduced.
        count = checkpoint.context - new_tokens if new_tokens < checkpoint.context else room
    return [_last_tokens(prompt, count, checkpoint) for prompt in prompts]


def _last_tokens(prompt: Prompt, count: int, checkpoint: Checkpoint) -> Prompt:
    tokens = checkpoint.prompt_ids(prompt)
    return tokens[-count:] if len(tokens) > count else prompt
