"""The requests of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from triton_llama_openai.errors import ApiError
from triton_llama_openai.protocol.chat import Message, TemplateFields, Tools
from triton_llama_openai.protocol.schema import Items, ModelName, Schema, TokenId


class TokenizeRequest(TemplateFields):
    """Either a prompt or a conversation, of which the chat template makes a prompt."""

    model: ModelName | None = None
    """a served name, another one is 404; not needed where there is only one"""
    prompt: str | None = None
    """a text; this or `messages`"""
    messages: Annotated[Items[Message], Field(min_length=1)] | None = None
    """as a chat's; this or `prompt`"""
    tools: Tools | None = None
    """as a chat's"""
    add_special_tokens: bool | None = None
    """default: true for a text, false for messages"""
    return_token_strs: bool | None = None
    """true: `token_strs`, otherwise null"""

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            number = "neither" if self.prompt is None else "both"
            raise ApiError(400, f"{number} of prompt and messages is given; it must be one", "prompt", "invalid_value")
        return self


class DetokenizeRequest(Schema):
    """Tokens to turn into text."""

    model: ModelName | None = None
    """a served name, another one is 404; not needed where there is only one"""
    tokens: Items[TokenId]
    """ids of the vocabulary"""
