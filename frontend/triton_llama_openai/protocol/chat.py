"""The request of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from triton_llama_openai.errors import ApiError
from triton_llama_openai.protocol.messages import Message, TemplateKwargs, ToolChoice, Tools, check_continuation
from triton_llama_openai.protocol.sampling import SamplingRequest, check_names
from triton_llama_openai.protocol.schema import (
    MAX_TOKEN,
    Items,
    JsonObject,
    Metadata,
    OnlyFalse,
    Unsupported,
    refused,
    without_effect,
)


class ChatRequest(SamplingRequest):
    """A request of /v1/chat/completions."""

    ENGINE_FIELDS: ClassVar[Mapping[str, str]] = {
        **SamplingRequest.ENGINE_FIELDS,
        "text_input": "messages",
        "num_logprobs": "top_logprobs",
    }

    messages: Annotated[Items[Message], Field(min_length=1)]
    """at most `max_messages`; roles system, developer (as system), user, assistant, tool; a content is text or a list
    of text parts, which are joined with line ends"""
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN)] | None = None
    """newer name of `max_tokens`"""
    logprobs: bool | None = None
    """true: log probabilities of the tokens"""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """alternatives of each token; above 0 with `logprobs`"""
    tools: Tools | None = None
    """functions (docs/openai.md#tools)"""
    tool_choice: ToolChoice | None = None
    """`none`, `auto`, `required`, or a function by name"""
    parallel_tool_calls: bool | None = None
    """false: one call at most"""
    modalities: Items[Literal["text"]] | None = None
    """text is the only one"""

    metadata: Metadata | None = without_effect("OpenAI's bookkeeping")
    store: bool | None = without_effect("OpenAI's bookkeeping")
    service_tier: Annotated[str, Field(max_length=64)] | None = without_effect("OpenAI's bookkeeping")
    safety_identifier: Annotated[str, Field(max_length=512)] | None = without_effect("OpenAI's bookkeeping")
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = without_effect("a hint for OpenAI's cache")
    prompt_cache_retention: Annotated[str, Field(max_length=64)] | None = without_effect("a hint for OpenAI's cache")
    prompt_cache_options: JsonObject | None = without_effect("a hint for OpenAI's cache")
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = without_effect("the models have no such setting")
    verbosity: Annotated[str, Field(max_length=64)] | None = without_effect("the models have no such setting")

    add_generation_prompt: bool | None = None
    """vLLM's; default: true"""
    continue_final_message: bool | None = None
    """vLLM's; true: the last message is continued"""
    chat_template_kwargs: TemplateKwargs | None = None
    """vLLM's; up to 64 more variables for the template, such as `enable_thinking`; those that it already has
    (`messages`, `tools`, …) are refused by name"""
    documents: Items[JsonObject] | None = None
    """vLLM's; for templates that show documents"""

    audio: Unsupported = None
    function_call: Annotated[object | None, refused("use tool_choice")] = None
    functions: Annotated[object | None, refused("use tools")] = None
    moderation: Unsupported = None
    prediction: Unsupported = None
    web_search_options: Unsupported = None
    chat_template: Annotated[object | None, refused("a template is code; the server's operator sets it")] = None
    echo: OnlyFalse = None
    """a field of completions"""

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs", "invalid_value")
        check_names("max_tokens", self.max_tokens, "max_completion_tokens", self.max_completion_tokens)
        check_continuation(self.continue_final_message, self.add_generation_prompt)
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """max_completion_tokens, or its old name max_tokens."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each generated token; None is no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def engine_fields(self) -> dict[str, str]:
        """Return the field of this request for each input of the model, for the model's errors."""
        max_tokens = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return super().engine_fields() | {"max_tokens": max_tokens}
