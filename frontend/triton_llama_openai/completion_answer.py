"""Answers of /v1/completions: one object, or events. Choices are numbered prompt after prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from triton_llama_openai.answer import Events, Head, Json, Usage, stop_reason
from triton_llama_openai.completion_request import CompletionRequest
from triton_llama_openai.engine_client import Delta, TokenLogprobs
from triton_llama_openai.logprobs import CompletionLogprobs


@dataclass(frozen=True)
class Echoed:
    """A prompt's text in front of its choices. first_token: the text of its first token, where it is tokens."""

    text: str = ""
    first_token: str = ""


@dataclass
class _Choice:
    """One choice. echoed: what is in front of it."""

    echoed: Echoed
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    last: Delta | None = None


class CompletionAnswer:
    """Collects the deltas of an answer that isn't streamed. echoed: what is in front of each prompt's choices."""

    def __init__(self, request: CompletionRequest, echoed: Sequence[Echoed]) -> None:
        self._request = request
        self._choices = [_Choice(prompt) for prompt in echoed for _ in range(request.choices)]

    def add(self, prompt: int, deltas: Iterable[Delta]) -> None:
        """Take what a response says about the prompt of this number."""
        for delta in deltas:
            choice = self._choices[prompt * self._request.choices + delta.index]
            choice.texts.append(delta.text)
            choice.logprobs += delta.logprobs
            if delta.prompt_logprobs is not None:
                choice.prompt_logprobs = delta.prompt_logprobs
            if delta.finish_reason:
                choice.last = delta

    def body(self, head: Head, usage: Usage) -> Json:
        """Return the answer."""
        choices = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        return {**head.body(), "choices": choices, "usage": usage.body()}

    def _choice(self, index: int, choice: _Choice) -> Json:
        assert choice.last is not None, "the engine's stream is complete"
        request = self._request
        logprobs = None
        if request.logprobs is not None:
            prompt = (choice.prompt_logprobs or []) if request.echo else []
            logprobs = CompletionLogprobs(choice.echoed.first_token).add([*prompt, *choice.logprobs])
        body: Json = {
            "index": index,
            "text": choice.echoed.text + "".join(choice.texts),
            "logprobs": logprobs,
            "finish_reason": choice.last.finish_reason,
            "stop_reason": stop_reason(choice.last, request.stop_strings),
        }
        if request.prompt_logprobs is not None:
            body["prompt_logprobs"] = choice.prompt_logprobs
        return body


class CompletionEvents(Events):
    """Turns the deltas of a streamed answer into events."""

    def __init__(self, request: CompletionRequest, echoed: Sequence[Echoed], head: Head, usage: Usage) -> None:
        super().__init__(head, request.stream_options, usage)
        self._request = request
        self._echoed = [prompt.text for prompt in echoed for _ in range(request.choices)]
        self._logprobs = [CompletionLogprobs() for _ in self._echoed]

    def begin(self) -> bytes:
        """Return the events that echo the prompts."""
        return b"".join(self._event(index, {"text": text}, None) for index, text in enumerate(self._echoed) if text)

    def add(self, prompt: int, deltas: Iterable[Delta]) -> bytes:
        """Return the events of a response about the prompt of this number."""
        return b"".join(self._delta(prompt * self._request.choices + delta.index, delta) for delta in deltas)

    def _delta(self, index: int, delta: Delta) -> bytes:
        logprobs = None if self._request.logprobs is None else self._logprobs[index].add(delta.logprobs)
        more: Json = {}
        if delta.finish_reason:
            more = {"stop_reason": stop_reason(delta, self._request.stop_strings)}
        return self._event(index, {"text": delta.text}, logprobs, delta.finish_reason or None, more)
