"""/v1/completions: texts or tokens to an answer, whole or streamed. Choices are numbered prompt after prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from triton_llama_openai.checkpoint import Checkpoint
from triton_llama_openai.engine_client import Chunk
from triton_llama_openai.engine_inputs import engine_fields, engine_inputs
from triton_llama_openai.errors import invalid, prompt_too_long, unsupported
from triton_llama_openai.generation import Generation
from triton_llama_openai.logprobs import CompletionLogprobs, check_prompt_logprobs
from triton_llama_openai.models import Models
from triton_llama_openai.protocol import CompletionRequest
from triton_llama_openai.responses import Json, dumps, response_head, stop_reason
from triton_llama_openai.settings import Settings
from triton_llama_openai.streaming import Events, check_stream, stream_answer, until_disconnect
from triton_llama_openai.structured_output import guide_of


async def answer_completion(
    request: Request, completion: CompletionRequest, models: Models, settings: Settings
) -> Response:
    """Answer a request. Raises ApiError or ClientLeftError."""
    prompts = completion.prompts
    _check(completion, prompts, settings.max_prompts)
    model = models.find(completion.model)
    _check_lengths(prompts, model.checkpoint.context)
    guide = guide_of(completion)
    prompt_logprobs = completion.prompt_logprobs
    if prompt_logprobs is None and completion.echo:
        prompt_logprobs = completion.logprobs
    check_prompt_logprobs(completion, prompts, prompt_logprobs, model.checkpoint.context)
    inputs = [
        engine_inputs(
            completion,
            prompt,
            max_tokens=completion.max_tokens,
            guide=guide,
            logprobs=completion.logprobs,
            prompt_logprobs=prompt_logprobs,
            stream_interval_ms=settings.stream_interval_ms,
        )
        for prompt in prompts
    ]
    fields = engine_fields(completion, guide)
    record = request.state.record
    record.prompt = completion.prompt
    generation = Generation(model.engine, completion, inputs, settings.request_timeout, fields, record)
    echoes = [Echo()] * len(prompts)
    if completion.echo:
        echoes = await asyncio.to_thread(_echoes, prompts, model.checkpoint)
    # One a choice.
    echoes = [echo for echo in echoes for _ in range(completion.choices)]
    head = response_head("cmpl", "text_completion", model.name, await model.fingerprint())
    if completion.streamed:
        return await stream_answer(request, generation, CompletionEvents(generation, head, completion, echoes))
    chunks = await until_disconnect(request, generation.whole())
    choices = [_choice(completion, chunk, echo) for chunk, echo in zip(chunks, echoes, strict=True)]
    body = head | {"choices": choices, "usage": generation.usage.body()}
    return Response(dumps(body), media_type="application/json")


def _check(completion: CompletionRequest, prompts: Sequence[object], max_prompts: int) -> None:
    check_stream(completion)
    if not prompts:
        raise invalid("prompt", [], "at least one prompt")
    if len(prompts) > max_prompts:
        raise invalid("prompt", f"{len(prompts)} prompts", f"at most {max_prompts}")
    if completion.best_of is not None and completion.best_of != completion.choices:
        reason = f"every completion is returned, so it must be n, which is {completion.choices}"
        raise unsupported("best_of", reason)
    if completion.streamed and completion.echo and completion.logprobs is not None:
        raise unsupported("echo", "a stream has no place for the prompt's logprobs")


def _check_lengths(prompts: Sequence[str | list[int]], context: int) -> None:
    """Refuse tokens beyond the context before anything copies them; a text's length is the model's to check."""
    longest = max((len(prompt) for prompt in prompts if not isinstance(prompt, str)), default=0)
    if longest >= context:
        raise prompt_too_long("prompt", longest, context)


@dataclass(frozen=True)
class Echo:
    """A prompt's text in front of a choice. first_token: the text of its first token, where it is tokens."""

    text: str = ""
    first_token: str = ""


def _echoes(prompts: Sequence[str | list[int]], checkpoint: Checkpoint) -> list[Echo]:
    return [
        Echo(prompt) if isinstance(prompt, str) else Echo(checkpoint.decode(prompt), checkpoint.decode(prompt[:1]))
        for prompt in prompts
    ]


def _choice(completion: CompletionRequest, chunk: Chunk, echo: Echo) -> Json:
    """Return the choice of an answer that isn't streamed."""
    logprobs = None
    if completion.logprobs is not None:
        prompt = (chunk.prompt_logprobs or []) if completion.echo else []
        logprobs = CompletionLogprobs(echo.first_token).add([*prompt, *chunk.logprobs])
    body: Json = {
        "index": chunk.index,
        "text": echo.text + chunk.text,
        "logprobs": logprobs,
        "finish_reason": chunk.finish_reason,
        "stop_reason": stop_reason(chunk, completion.stop_strings),
    }
    if completion.prompt_logprobs is not None:
        body["prompt_logprobs"] = chunk.prompt_logprobs
    return body


class CompletionEvents(Events):
    """Makes the events of a streamed completion. echoes: one for each choice."""

    def __init__(self, generation: Generation, head: Json, completion: CompletionRequest, echoes: list[Echo]) -> None:
        super().__init__(generation, head)
        self._completion = completion
        self._echoes = echoes
        self._logprobs = [CompletionLogprobs() for _ in echoes]

    def begin(self) -> bytes:
        """Return the events that echo the prompts."""
        return b"".join(
            self._event(index, {"text": echo.text}, None) for index, echo in enumerate(self._echoes) if echo.text
        )

    def add(self, chunk: Chunk) -> bytes:
        """Return the event of a chunk."""
        logprobs = None if self._completion.logprobs is None else self._logprobs[chunk.index].add(chunk.logprobs)
        reason: Json = {}
        if chunk.finish_reason:
            reason = {"stop_reason": stop_reason(chunk, self._completion.stop_strings)}
        return self._event(chunk.index, {"text": chunk.text}, logprobs, chunk.finish_reason or None, reason)
