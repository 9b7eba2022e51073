"""Requests of /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from triton_llama_openai.chat_request import Message, Tools
from triton_llama_openai.sampling_request import JsonObject
from triton_llama_openai.schema import Items, Schema, TokenId

ModelName = Annotated[str, Field(min_length=1, max_length=256)]


class TokenizeRequest(Schema):
    """A prompt, or a conversation, which the chat template makes one."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[Items[Message], Field(min_length=1)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Schema):
    """Tokens to turn into text."""

    model: ModelName | None = None
    tokens: Items[TokenId]
