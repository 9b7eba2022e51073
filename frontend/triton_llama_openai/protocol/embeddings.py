"""The request of /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from triton_llama_openai.errors import invalid
from triton_llama_openai.protocol.prompts import Prompt, Prompts, prompts_of
from triton_llama_openai.protocol.sampling import Priority, TruncatedLength
from triton_llama_openai.protocol.schema import MAX_TOKEN, CacheSalt, ModelName, OnlyTrue, Schema, without_effect

MAX_INPUTS = 2048
"""OpenAI's bound."""


class EmbeddingRequest(Schema):
    """A request of /v1/embeddings."""

    model: ModelName | None = None
    """a served name, another one is 404; not needed where there is only one"""
    input: Prompts
    """a text, a list of texts, tokens, or a list of token lists, each shorter than `max_model_len`; at most 2048"""
    encoding_format: Literal["float", "base64"] | None = None
    """`base64`: of the numbers as 32-bit floats, little endian; default: `float`"""
    dimensions: Annotated[int, Field(ge=1, le=MAX_TOKEN)] | None = None
    """numbers of an embedding: its first ones, normalized again (docs/openai.md#embeddings)"""
    truncate_prompt_tokens: TruncatedLength | None = None
    """vLLM's; of a longer input its first tokens, at most `max_model_len` - 1, which is also -1"""
    priority: Priority | None = None
    """vLLM's; lower first among the requests that wait for a slot"""
    add_special_tokens: OnlyTrue = None
    """a text gets the special tokens that the tokenizer adds"""
    cache_salt: CacheSalt | None = without_effect("vLLM's; embeddings don't use the prefix cache")
    user: Annotated[str, Field(max_length=512)] | None = without_effect("OpenAI's bookkeeping")

    @model_validator(mode="after")
    def _check_number(self) -> Self:
        if len(self.inputs) > MAX_INPUTS:
            raise invalid("input", f"{len(self.inputs)} inputs", f"at most {MAX_INPUTS}")
        return self

    @property
    def inputs(self) -> list[Prompt]:
        """Every input, as a text or as tokens."""
        return prompts_of(self.input)
