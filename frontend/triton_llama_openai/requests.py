"""Chat and completion requests as work for the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from triton_llama.tensors import Tensor

from triton_llama_openai.answer import Head
from triton_llama_openai.answering import Work, answer_streamed, answer_whole
from triton_llama_openai.chat_answer import ChatAnswer, ChatEvents
from triton_llama_openai.chat_request import ChatRequest
from triton_llama_openai.checkpoint import Checkpoint
from triton_llama_openai.completion_answer import CompletionAnswer, CompletionEvents, Echoed
from triton_llama_openai.completion_request import CompletionRequest
from triton_llama_openai.conversation import chat_prompt, check_messages
from triton_llama_openai.engine_client import EngineClient
from triton_llama_openai.engine_inputs import Logprobs, engine_inputs
from triton_llama_openai.errors import ApiError, invalid, prompt_too_long, unsupported
from triton_llama_openai.generation import Job
from triton_llama_openai.guides import Guide, guide_of
from triton_llama_openai.request_record import RequestRecord
from triton_llama_openai.sampling_request import SamplingRequest
from triton_llama_openai.served_models import ServedModels
from triton_llama_openai.settings import Settings
from triton_llama_openai.tools import tool_use

MOST_PROMPT_LOGPROBS = 1 << 19
"""In one answer: tokens of all prompts, times completions of each, times alternatives and the token itself."""


class Requests:
    """Answers chat and completion requests under one set of settings."""

    def __init__(self, settings: Settings, models: ServedModels) -> None:
        self._settings = settings
        self._models = models

    async def chat(self, request: Request, asked: ChatRequest) -> Response:
        """Answer /v1/chat/completions. Raises ApiError or ClientLeftError."""
        _check_chat(asked, self._settings.max_messages)
        model = self._models.find(asked.model)
        use = tool_use(asked, model.tool_form)
        prompt = chat_prompt(asked, model.checkpoint.template, use.shown)
        logprobs = Logprobs(asked.top_logprobs or 0 if asked.logprobs else None, asked.prompt_logprobs)
        _check_prompt_logprobs(asked, [prompt], logprobs.prompt, model.checkpoint.context)
        tensors = engine_inputs(
            asked, prompt, asked.asked_max_tokens, use.guide, logprobs, self._settings.stream_interval_ms
        )
        fields = _engine_fields(asked, use.guide)
        if asked.max_completion_tokens is not None:
            fields["max_tokens"] = "max_completion_tokens"
        work = self._work(request, asked, [tensors], fields, prompt, model.engine)
        kind = "chat.completion.chunk" if asked.streamed else "chat.completion"
        head = Head.new("chatcmpl", kind, model.name, await model.fingerprint())
        if asked.streamed:
            return answer_streamed(work, ChatEvents(asked, use, head, work.usage))
        return await answer_whole(request, work, ChatAnswer(asked, use), head)

    async def completion(self, request: Request, asked: CompletionRequest) -> Response:
        """Answer /v1/completions. Raises ApiError or ClientLeftError."""
        prompts = asked.prompts
        _check_completion(asked, prompts, self._settings.max_prompts)
        model = self._models.find(asked.model)
        _check_lengths(prompts, model.checkpoint.context)
        guide = guide_of(asked)
        prompt_logprobs = asked.prompt_logprobs
        if prompt_logprobs is None and asked.echo:
            prompt_logprobs = asked.logprobs
        _check_prompt_logprobs(asked, prompts, prompt_logprobs, model.checkpoint.context)
        logprobs = Logprobs(asked.logprobs, prompt_logprobs)
        interval = self._settings.stream_interval_ms
        tensors = [engine_inputs(asked, prompt, asked.max_tokens, guide, logprobs, interval) for prompt in prompts]
        work = self._work(request, asked, tensors, _engine_fields(asked, guide), asked.prompt, model.engine)
        echoed = [Echoed()] * len(prompts)
        if asked.echo:
            echoed = await asyncio.to_thread(_echoed, prompts, model.checkpoint)
        head = Head.new("cmpl", "text_completion", model.name, await model.fingerprint())
        if asked.streamed:
            return answer_streamed(work, CompletionEvents(asked, echoed, head, work.usage))
        return await answer_whole(request, work, CompletionAnswer(asked, echoed), head)

    def _work(
        self,
        request: Request,
        asked: SamplingRequest,
        prompts: Sequence[Sequence[Tensor]],
        fields: dict[str, str],
        prompt: object,
        engine: EngineClient,
    ) -> Work:
        record: RequestRecord = request.state.record
        record.ignored = asked.ignored()
        record.prompt = prompt
        job = Job(prompts, record.id, asked.choices, self._settings.request_timeout)
        return Work(job, engine, fields, record)


def _engine_fields(asked: SamplingRequest, guide: Guide | None) -> dict[str, str]:
    """Return the request's field for each input of the model."""
    fields = dict(asked.ENGINE_FIELDS)
    if guide is not None:
        fields |= {"guided_decoding_guide": guide.field, "guided_decoding_guide_type": guide.field}
    return fields


def _echoed(prompts: Sequence[str | list[int]], checkpoint: Checkpoint) -> list[Echoed]:
    return [
        Echoed(prompt) if isinstance(prompt, str) else Echoed(checkpoint.decode(prompt), checkpoint.decode(prompt[:1]))
        for prompt in prompts
    ]


def _check_both(asked: SamplingRequest) -> None:
    if asked.stream_options is not None and not asked.streamed:
        raise ApiError(400, "stream_options needs stream to be true", "stream_options", "invalid_value")
    if asked.streamed and asked.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "a stream has no place for them")


def _check_chat(asked: ChatRequest, most_messages: int) -> None:
    _check_both(asked)
    check_messages(asked.messages, most_messages)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs", "invalid_value")
    both = asked.max_tokens, asked.max_completion_tokens
    if None not in both and both[0] != both[1]:
        message = f"max_tokens is {both[0]} and max_completion_tokens is {both[1]}; give one of them"
        raise ApiError(400, message, "max_tokens", "invalid_value")


def _check_completion(asked: CompletionRequest, prompts: Sequence[object], most_prompts: int) -> None:
    _check_both(asked)
    if not prompts:
        raise invalid("prompt", [], "at least one prompt")
    if len(prompts) > most_prompts:
        raise invalid("prompt", f"{len(prompts)} prompts", f"at most {most_prompts}")
    if asked.best_of is not None and asked.best_of != asked.choices:
        raise unsupported("best_of", f"every completion is returned, so it must be n, which is {asked.choices}")
    if asked.streamed and asked.echo and asked.logprobs is not None:
        raise unsupported("echo", "a stream has no place for the prompt's logprobs")


def _check_lengths(prompts: Sequence[str | list[int]], context: int) -> None:
    """Refuse tokens beyond the context before anything copies them; a text's length is the model's to check."""
    longest = max((len(prompt) for prompt in prompts if not isinstance(prompt, str)), default=0)
    if longest >= context:
        raise prompt_too_long("prompt", longest, context)


def _check_prompt_logprobs(
    asked: SamplingRequest, prompts: Sequence[str | list[int]], top: int | None, context: int
) -> None:
    """Refuse more log probabilities of prompts than one answer may have. top: alternatives of each token."""
    if top is None:
        return
    # A text has no more tokens than bytes.
    sizes = [len(prompt.encode() if isinstance(prompt, str) else prompt) for prompt in prompts]
    count = sum(min(size, context) for size in sizes) * asked.choices * (top + 1)
    if count > MOST_PROMPT_LOGPROBS:
        field = "logprobs" if asked.prompt_logprobs is None else "prompt_logprobs"
        value = f"up to {count} log probabilities of the prompts' tokens"
        raise invalid(field, value, f"at most {MOST_PROMPT_LOGPROBS} in one request")
