"""A conversation prepared for the model: its prompt, its tools, its guide, and the parser of its output.

Chat, the Responses API and the Messages API share it; they differ in how they write requests and answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triton_llama_openai.guides.structured_output import follow
from triton_llama_openai.output.output_parser import Markers, OutputParser, is_closed, is_open, is_open_in, tag_format
from triton_llama_openai.prompt.chat_template import render_messages
from triton_llama_openai.prompt.special_tokens import RenderedPrompt
from triton_llama_openai.prompt.tokenizer import PromptTokenizer, truncate
from triton_llama_openai.prompt.tool_use import ToolUse, tool_use
from triton_llama_openai.protocol.chat import ChatRequest, text_of
from triton_llama_openai.protocol.prompts import Prompt
from triton_llama_openai.record import RequestRecord
from triton_llama_openai.settings import Settings
from triton_llama_openai.triton.generation import Generation

if TYPE_CHECKING:
    from triton_llama_openai.served.served_model import ServedModel


@dataclass(frozen=True)
class PreparedChat:
    """A conversation with what its answer needs: the request to Triton, and how its output is read.

    prompt: the text of the rendered messages; their tokens where clients' texts have special tokens in them, and the
    last tokens where it is truncated. new_parser: makes the parser of one choice's output.
    """

    prompt: Prompt
    use: ToolUse
    new_parser: Callable[[], OutputParser]
    generation: Generation
    model: ServedModel

    async def prompt_ids(self) -> list[int]:
        """Return the prompt's tokens as the server sees them."""
        # In a thread: a long text takes the tokenizer long.
        return await asyncio.to_thread(self.model.tokenizer.prompt_ids, self.prompt)

    def count_reasoning(self, choices: Iterable[OutputParser]) -> None:
        """Count the tokens of all choices' reasoning in the usage, as the tokenizer splits its text.

        The model doesn't say which tokens were whose. It takes milliseconds for thousands of tokens.
        """
        usage = self.generation.usage
        tokens = sum(self.model.tokenizer.num_tokens("".join(choice.reasoning)) for choice in choices)
        usage.reasoning_tokens = min(tokens, usage.completion_tokens)


async def prepare_chat(
    chat: ChatRequest, model: ServedModel, settings: Settings, record: RequestRecord
) -> PreparedChat:
    """Prepare the conversation of a request. Raises ApiError."""
    use = tool_use(chat, model.tool_form)
    # A structural tag's text is free outside of its structures.
    guided = use.guide is not None and use.guide.kind != "structural_tag"
    without_reasoning = guided and not model.reasons_before_guides
    rendered = render_messages(
        model.tokenizer.template(with_tools=bool(use.template_tools)),
        chat.messages,
        use.template_tools,
        chat,
        defaults={"enable_thinking": False} if without_reasoning else None,
        documents=chat.documents,
        field=chat.client_field("messages"),
        guard=model.tokenizer.guard if settings.special_tokens == "text" else None,
    )
    text = record.prompt = rendered.text
    if rendered.placeholders or chat.truncate_prompt_tokens is not None:
        # A long text takes the tokenizer long.
        prompts = await asyncio.to_thread(_prompts, chat, rendered, model.tokenizer)
    else:
        prompts = [text]
    guide = use.guide
    markers = None if without_reasoning else model.markers
    begun = markers is not None and _is_begun(chat, text, markers)
    if markers is not None and guide is not None and guided:
        may_begin = not (chat.continue_final_message or is_closed(markers, text))
        if begun or may_begin:
            guide = follow(tag_format(markers, begun=begun), guide)
    record.ignored += use.ignored
    generation = Generation(chat, prompts, guide, model, settings, record)

    def new_parser() -> OutputParser:
        calls = None if use.call_reader is None else use.call_reader()
        # Other blanks after a marker are the guided text's own.
        return OutputParser(markers or (), calls, begun=begun, blanks="\n" if guided else None)

    if guided and use.call_reader is not None:
        generation.end_with(new_parser)
    return PreparedChat(prompts[0], use, new_parser, generation, model)


def _prompts(chat: ChatRequest, rendered: RenderedPrompt, tokenizer: PromptTokenizer) -> list[Prompt]:
    return truncate(chat, [tokenizer.prompt_of(rendered)], tokenizer)


def _is_begun(chat: ChatRequest, prompt: str, markers: Markers) -> bool:
    """Return whether the text begins within reasoning."""
    if chat.continue_final_message:
        return is_open_in(markers, text_of(chat.messages[-1].content))
    return is_open(markers, prompt)
