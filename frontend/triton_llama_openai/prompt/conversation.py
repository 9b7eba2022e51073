"""A conversation prepared for the engine: its prompt, its tools, its guide, and the parser of its output.

The chat path and the Responses API share it; they differ in how they write requests and answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triton_llama_openai.errors import check_count
from triton_llama_openai.metrics import RequestRecord
from triton_llama_openai.output.output_parser import OutputParser
from triton_llama_openai.output.reasoning import Markers, is_closed, is_open, is_open_in, tag_format
from triton_llama_openai.output.structured_output import follow
from triton_llama_openai.output.tool_calls import ToolUse, tool_use
from triton_llama_openai.prompt.chat_template import render_messages
from triton_llama_openai.protocol.chat import ChatRequest
from triton_llama_openai.protocol.messages import text_of
from triton_llama_openai.protocol.schema import JsonObject
from triton_llama_openai.settings import Settings
from triton_llama_openai.triton.generation import Generation, Prompt, truncate

if TYPE_CHECKING:
    from triton_llama_openai.routes.models import ServedModel


@dataclass(frozen=True)
class PreparedChat:
    """A conversation that can be generated.

    prompt: the rendered messages, or the last tokens of them. new_parser: makes the parser of one choice's output.
    """

    prompt: Prompt
    use: ToolUse
    new_parser: Callable[[], OutputParser]
    generation: Generation
    model: ServedModel

    def count_reasoning(self, choices: Iterable[OutputParser]) -> None:
        """Count the tokens of all choices' reasoning in the usage, as the tokenizer splits its text.

        The engine doesn't say which tokens were whose. It takes milliseconds for thousands of tokens.
        """
        usage = self.generation.usage
        tokens = sum(self.model.checkpoint.num_tokens("".join(choice.reasoning)) for choice in choices)
        usage.reasoning_tokens = min(tokens, usage.completion_tokens)


def prepare_chat(
    chat: ChatRequest, model: ServedModel, settings: Settings, record: RequestRecord, cache_salt: str | None
) -> PreparedChat:
    """Prepare the conversation of a request; with `truncate_prompt_tokens` it tokenizes. Raises ApiError.

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
    guide = use.guide
    markers = None if without_reasoning else model.markers
    begun = markers is not None and _is_begun(chat, prompt, markers)
    if markers is not None and guide is not None and guided:
        may_begin = not (chat.continue_final_message or is_closed(markers, prompt))
        if begun or may_begin:
            guide = follow(tag_format(markers, begun=begun), guide)
    record.prompt = prompt
    prompts = truncate(chat, [prompt], model.checkpoint)
    generation = Generation(chat, prompts, guide, model, settings, record, cache_salt)

    def new_parser() -> OutputParser:
        calls = None if use.call_reader is None else use.call_reader()
        # Other blanks after a marker are the guided text's own.
        return OutputParser(markers or (), calls, begun=begun, blanks="\n" if guided else None)

    return PreparedChat(prompts[0], use, new_parser, generation, model)


def _template_kwargs(chat: ChatRequest, *, without_reasoning: bool) -> JsonObject:
    """Return the request's variables of the template."""
    kwargs = chat.chat_template_kwargs or {}
    return {"enable_thinking": False, **kwargs} if without_reasoning else kwargs


def _is_begun(chat: ChatRequest, prompt: str, markers: Markers) -> bool:
    """Return whether the text begins within reasoning."""
    if chat.continue_final_message:
        return is_open_in(markers, text_of(chat.messages[-1].content))
    return is_open(markers, prompt)
