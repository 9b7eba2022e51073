"""A conversation in the engine: its prompt, its tools, its guide, and what reads its text.

The chat path and the Responses API share it; they differ in how they write requests and answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from triton_llama.completion import Chunk, TokenLogprobs

from triton_llama_openai.chat_template import render_messages
from triton_llama_openai.errors import check_count
from triton_llama_openai.generation import Generation, Prompt
from triton_llama_openai.metrics import RequestRecord
from triton_llama_openai.models import ServedModel
from triton_llama_openai.protocol.chat import ChatRequest
from triton_llama_openai.protocol.messages import text_of
from triton_llama_openai.protocol.schema import JsonObject
from triton_llama_openai.reasoning import (
    Markers,
    Reasoning,
    ReasoningReader,
    is_closed,
    is_open,
    is_open_in,
    tag_format,
)
from triton_llama_openai.settings import Settings
from triton_llama_openai.structured_output import follow
from triton_llama_openai.tool_calls import Part, TextReader, ToolCall, ToolUse, tool_use
from triton_llama_openai.truncation import truncate

Reader = Callable[[], TextReader | ReasoningReader]
"""Makes the reader of one choice's text."""


class ChoiceReader:
    """Turns one choice's chunks into parts of the answer.

    called: whether it has a tool call. reasoning: the parts of its text. tokens: log probabilities of those whose text
    isn't sent yet.
    """

    def __init__(self, reader: TextReader | ReasoningReader, *, forced: bool) -> None:
        self._reader = reader
        self._forced = forced
        self.called = False
        self.reasoning: list[str] = []
        self.tokens: list[TokenLogprobs] = []

    def read(self, chunk: Chunk) -> list[Part | Reasoning]:
        """Return the parts that a chunk adds to the choice."""
        self.tokens += chunk.logprobs
        parts: list[Part | Reasoning] = [*self._reader.read(chunk.text)]
        if chunk.finish_reason:
            parts += self._reader.end(cut=chunk.finish_reason == "length")
        self.reasoning += [part.text for part in parts if isinstance(part, Reasoning)]
        self.called = self.called or any(isinstance(part, ToolCall) for part in parts)
        within_reasoning = isinstance(self._reader, ReasoningReader) and self._reader.is_within
        if chunk.finish_reason and self._forced and not self.called and not within_reasoning:
            # The answer has nothing of a call that was cut off.
            self.tokens = []
        return parts

    def take_tokens(self) -> list[TokenLogprobs]:
        """Return and remove the tokens."""
        tokens, self.tokens = self.tokens, []
        return tokens


@dataclass(frozen=True)
class Conversation:
    """A conversation that can be generated.

    prompt: the rendered messages, or the last tokens of them. reader: of the parts of a choice's text.
    """

    prompt: Prompt
    use: ToolUse
    reader: Reader
    generation: Generation
    model: ServedModel

    def choice(self) -> ChoiceReader:
        """Return the reader of one choice's chunks."""
        return ChoiceReader(self.reader(), forced=self.use.forced)

    def count_reasoning(self, choices: Iterable[ChoiceReader]) -> None:
        """Count the tokens of all choices' reasoning in the usage, as the tokenizer splits its text.

        The engine doesn't say which tokens were whose. It takes milliseconds for thousands of tokens.
        """
        usage = self.generation.usage
        tokens = sum(self.model.checkpoint.num_tokens("".join(choice.reasoning)) for choice in choices)
        usage.reasoning_tokens = min(tokens, usage.completion_tokens)


def converse(
    chat: ChatRequest, model: ServedModel, settings: Settings, record: RequestRecord, cache_salt: str | None
) -> Conversation:
    """Return the conversation of a request; with `truncate_prompt_tokens` it tokenizes. Raises ApiError.

    cache_salt: the model's input.
    """
    field = chat.client_field("messages")
    check_count(field, chat.messages, settings.max_messages, "messages")
    use = tool_use(chat, model.tool_form)
    # A structural tag's text is free outside of its structures.
    guided = use.guide is not None and use.guide.kind != "structural_tag"
    without_reasoning = guided and not model.reasons_before_guides
    prompt = render_messages(
        model.checkpoint.template,
        chat.messages,
        use.template_tools,
        add_generation_prompt=chat.add_generation_prompt is not False,
        continue_final_message=bool(chat.continue_final_message),
        template_kwargs=_template_kwargs(chat, without_reasoning=without_reasoning),
        documents=chat.documents,
        field=field,
    )
    guide, markers = use.guide, model.markers
    reader: Reader = use.reader
    if markers is not None and not without_reasoning:
        begun = _is_begun(chat, prompt, markers)
        reader = _with_reasoning(markers, use.reader, begun=begun, guided=guided)
        may_begin = not (chat.continue_final_message or is_closed(markers, prompt))
        if guide is not None and guided and (begun or may_begin):
            guide = follow(tag_format(markers, begun=begun), guide)
    record.prompt = prompt
    prompts = truncate(chat, [prompt], model.checkpoint)
    generation = Generation(chat, prompts, guide, model, settings, record, cache_salt)
    return Conversation(prompts[0], use, reader, generation, model)


def _template_kwargs(chat: ChatRequest, *, without_reasoning: bool) -> JsonObject:
    """Return the request's variables of the template."""
    kwargs = chat.chat_template_kwargs or {}
    return {"enable_thinking": False, **kwargs} if without_reasoning else kwargs


def _is_begun(chat: ChatRequest, prompt: str, markers: Markers) -> bool:
    """Return whether the text begins within reasoning."""
    if chat.continue_final_message:
        return is_open_in(markers, text_of(chat.messages[-1].content))
    return is_open(markers, prompt)


def _with_reasoning(markers: Markers, reader: Callable[[], TextReader], *, begun: bool, guided: bool) -> Reader:
    """Return what makes the reader of a choice that may begin with reasoning, or within it."""
    # Other blanks after a marker are the guided text's own.
    blanks = "\n" if guided else None
    return lambda: ReasoningReader(markers, reader(), begun=begun, blanks=blanks)
