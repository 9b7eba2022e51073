"""The request of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from triton_llama_openai.errors import ApiError
from triton_llama_openai.protocol.messages import Message, TemplateKwargs, ToolChoice, Tools, check_continuation
from triton_llama_openai.protocol.sampling import SamplingRequest, check_names
from triton_llama_openai.protocol.schema import (
    IGNORED,
    MAX_TOKEN,
    Items,
    JsonObject,
    Metadata,
    OnlyFalse,
    Unsupported,
    refused,
)


class ChatRequest(SamplingRequest):
    """A request of /v1/chat/completions."""

    ENGINE_FIELDS: ClassVar[Mapping[str, str]] = {
        **SamplingRequest.ENGINE_FIELDS,
        "text_input": "messages",
        "num_logprobs": "top_logprobs",
    }

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: Items[Literal["text"]] | None = None

    metadata: Metadata | None = Field(None, json_schema_extra=IGNORED)
    store: bool | None = Field(None, json_schema_extra=IGNORED)
    service_tier: Annotated[str, Field(max_length=64)] | None = Field(None, json_schema_extra=IGNORED)
    safety_identifier: Annotated[str, Field(max_length=512)] | None = Field(None, json_schema_extra=IGNORED)
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = Field(None, json_schema_extra=IGNORED)
    prompt_cache_retention: Annotated[str, Field(max_length=64)] | None = Field(None, json_schema_extra=IGNORED)
    prompt_cache_options: JsonObject | None = Field(None, json_schema_extra=IGNORED)
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = Field(None, json_schema_extra=IGNORED)
    verbosity: Annotated[str, Field(max_length=64)] | None = Field(None, json_schema_extra=IGNORED)

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    documents: Items[JsonObject] | None = None

    audio: Unsupported = None
    function_call: Annotated[object | None, refused("use tool_choice")] = None
    functions: Annotated[object | None, refused("use tools")] = None
    moderation: Unsupported = None
    prediction: Unsupported = None
    web_search_options: Unsupported = None
    chat_template: Annotated[object | None, refused("a template is code; the server's operator sets it")] = None
    echo: OnlyFalse = None

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
