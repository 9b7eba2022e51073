"""/v1/completions: texts or tokens to an answer, whole or streamed. Choices are numbered prompt after prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from triton_llama.completion import Chunk, TokenLogprobs

from triton_llama_openai.errors import invalid
from triton_llama_openai.guides.structured_output import guide_of
from triton_llama_openai.output.answers import dumps, response_head, stop_reason, until_disconnect
from triton_llama_openai.output.logprobs import CompletionLogprobs
from triton_llama_openai.output.streaming import ChoiceEvents, stream_answer
from triton_llama_openai.prompt.tokenizer import PromptTokenizer, truncate
from triton_llama_openai.protocol.completions import CompletionRequest
from triton_llama_openai.protocol.prompts import Prompt
from triton_llama_openai.protocol.schema import JsonObject
from triton_llama_openai.request_body import parse_request
from triton_llama_openai.served.models import Models
from triton_llama_openai.settings import Settings
from triton_llama_openai.triton.generation import Generation
from triton_llama_openai.triton.inputs import check_lengths


def add_completions(router: APIRouter, models: Models, settings: Settings) -> None:
    """Add the routes."""

    @router.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        """Texts or tokens, one prompt or several."""
        return await _answer(request, await parse_request(request, CompletionRequest, settings), models, settings)

    @router.post("/v1/completions/render", response_model=None)
    async def render(request: Request) -> Response:
        """vLLM's: the list of a completion's prompts as tokens, without an answer."""
        completion = await parse_request(request, CompletionRequest, settings)
        model = await models.find_for("generate", completion.model, request.state.record)
        prompts = await _prompts(completion, model.tokenizer, settings)
        prompt_ids = await _prompt_ids(prompts, model.tokenizer)
        return JSONResponse([{"model": model.name, "token_ids": ids} for ids in prompt_ids])


async def _answer(request: Request, completion: CompletionRequest, models: Models, settings: Settings) -> Response:
    model = await models.find_for("generate", completion.model, request.state.record)
    prompts = await _prompts(completion, model.tokenizer, settings)
    request.state.record.prompt = completion.prompt
    guide = guide_of(completion)
    generation = Generation(completion, prompts, guide, model, settings, request.state.record)
    echoes = [Echo()] * len(prompts)
    if completion.echo:
        echoes = await asyncio.to_thread(_echoes, completion, prompts, model.tokenizer)
    prompt_ids: list[list[int]] = []
    if completion.return_token_ids:
        prompt_ids = await _prompt_ids(prompts, model.tokenizer)
    # One a choice.
    echoes = [echo for echo in echoes for _ in range(completion.choices)]
    prompt_ids = [ids for ids in prompt_ids for _ in range(completion.choices)]
    head = response_head("cmpl", "text_completion", model.name, model.fingerprint)
    if completion.streamed:
        events = CompletionEvents(generation, head, completion, echoes, prompt_ids)
        return await stream_answer(request, generation, events)
    chunks = await until_disconnect(request, generation.whole())

    def encoded() -> bytes:
        choices = [_choice(completion, chunk, echo) for chunk, echo in zip(chunks, echoes, strict=True)]
        for choice, chunk, ids in zip(choices, chunks, prompt_ids, strict=False):
            choice |= {"token_ids": chunk.output_ids, "prompt_token_ids": ids}
        return dumps(head | {"choices": choices, **generation.counts()})

    # In a thread: log probabilities are megabytes.
    return Response(await asyncio.to_thread(encoded), media_type="application/json")


async def _prompts(completion: CompletionRequest, tokenizer: PromptTokenizer, settings: Settings) -> Sequence[Prompt]:
    """Return the prompts as they are computed. Raises ApiError."""
    prompts = completion.prompts
    if len(prompts) > settings.max_prompts:
        raise invalid("prompt", f"{len(prompts)} prompts", f"at most {settings.max_prompts}")
    if completion.truncate_prompt_tokens is not None:
        prompts = await asyncio.to_thread(truncate, completion, prompts, tokenizer)
    check_lengths("prompt", prompts, tokenizer.context)
    return prompts


async def _prompt_ids(prompts: Sequence[Prompt], tokenizer: PromptTokenizer) -> list[list[int]]:
    # In a thread: a long text takes the tokenizer long.
    return await asyncio.to_thread(lambda: [tokenizer.prompt_ids(prompt) for prompt in prompts])


@dataclass(frozen=True)
class Echo:
    """A prompt's text in front of a choice. first_id: of its first token, where the answer names tokens by id."""

    text: str = ""
    first_id: int | None = None


def _echoes(completion: CompletionRequest, prompts: Sequence[Prompt], tokenizer: PromptTokenizer) -> list[Echo]:
    named = completion.logprobs is not None and completion.return_tokens_as_token_ids
    return [
        Echo(
            prompt if isinstance(prompt, str) else tokenizer.decode(prompt),
            next(iter(tokenizer.prompt_ids(prompt)), None) if named else None,
        )
        for prompt in prompts
    ]


def _choice(completion: CompletionRequest, chunk: Chunk, echo: Echo) -> JsonObject:
    """Return the choice of an answer that isn't streamed."""
    logprobs = None
    if completion.logprobs is not None:
        writer = CompletionLogprobs(as_ids=bool(completion.return_tokens_as_token_ids))
        echoed = writer.add_prompt(echo.text, chunk.prompt_logprobs or [], echo.first_id) if completion.echo else {}
        logprobs = {name: echoed.get(name, []) + values for name, values in writer.add(chunk.logprobs).items()}
    return {
        "index": chunk.index,
        "text": echo.text + chunk.text,
        "logprobs": logprobs,
        "finish_reason": chunk.finish_reason,
        "stop_reason": stop_reason(chunk, completion.stop_strings),
        "prompt_logprobs": None if completion.prompt_logprobs is None else chunk.prompt_logprobs,
    }


class CompletionEvents(ChoiceEvents):
    """Makes the events of a streamed completion.

    echoes: one for each choice. prompt_ids: the same, or none for a request without return_token_ids.
    """

    def __init__(
        self,
        generation: Generation,
        head: JsonObject,
        completion: CompletionRequest,
        echoes: list[Echo],
        prompt_ids: list[list[int]],
    ) -> None:
        super().__init__(generation, head)
        # Prompt ids not sent yet.
        self._prompt_ids = dict(enumerate(prompt_ids))
        self._completion = completion
        # Echoes not sent yet.
        self._echoes = {index: echo for index, echo in enumerate(echoes) if echo.text}
        as_ids = bool(completion.return_tokens_as_token_ids)
        self._logprobs = [CompletionLogprobs(as_ids=as_ids) for _ in echoes]

    def begin(self) -> bytes:
        """Return the events that echo the prompts; with log probabilities they come with each choice's first chunk."""
        if self._completion.logprobs is not None:
            return b""
        return b"".join([self._echo(index, None) for index in list(self._echoes)])

    def add(self, chunk: Chunk) -> bytes:
        """Return the events of a chunk."""
        echo = self._echo(chunk.index, chunk.prompt_logprobs or []) if chunk.index in self._echoes else b""
        self._begun = True
        return echo + self._text(chunk)

    def _echo(self, index: int, tokens: list[TokenLogprobs | None] | None) -> bytes:
        """Return the event of a choice's prompt. tokens: its log probabilities, for a request with them."""
        echo, writer = self._echoes.pop(index), self._logprobs[index]
        logprobs = None if tokens is None else writer.add_prompt(echo.text, tokens, echo.first_id)
        return self._event(index, {"text": echo.text}, logprobs, additions=self._token_ids(index))

    def _text(self, chunk: Chunk) -> bytes:
        logprobs = None if self._completion.logprobs is None else self._logprobs[chunk.index].add(chunk.logprobs)
        additions = self._token_ids(chunk.index, chunk.output_ids)
        if chunk.finish_reason:
            additions["stop_reason"] = stop_reason(chunk, self._completion.stop_strings)
        return self._event(chunk.index, {"text": chunk.text}, logprobs, chunk.finish_reason or None, additions)

    def _token_ids(self, index: int, ids: tuple[int, ...] = ()) -> JsonObject:
        """Return the ids for an event of a choice; the first one has those of the prompt, too."""
        if not self._completion.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": self._prompt_ids.pop(index)} if index in self._prompt_ids else {}
        return {"token_ids": ids, **prompt}
