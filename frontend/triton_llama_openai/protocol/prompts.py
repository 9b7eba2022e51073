"""The forms in which completions and embeddings take their prompts: texts or tokens, one prompt or several."""

from __future__ import annotations

from typing import Annotated, cast

from pydantic import Discriminator, Field, Tag

from triton_llama_openai.protocol.schema import Items, TokenId, by_json_type

Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[Items[TokenId], Field(min_length=1)]
Prompt = str | list[int]
"""A text or tokens."""


def _prompt_kind(value: object) -> str | None:
    """Return the tag of the form; a list's first element decides."""
    if not isinstance(value, list):
        return by_json_type(value) if isinstance(value, str) else None
    match value[0] if value else None:
        case str():
            return "<texts>"
        case list():
            return "<token lists>"
    return "<tokens>"


Prompts = Annotated[
    Annotated[Text, Tag("<string>")]
    | Annotated[Items[Text], Tag("<texts>")]
    | Annotated[Tokens, Tag("<tokens>")]
    | Annotated[Items[Tokens], Tag("<token lists>")],
    Discriminator(
        _prompt_kind,
        custom_error_type="union_type",
        custom_error_message="Input should be a text, a list of texts, a list of tokens, or a list of such lists",
    ),
]


def prompts_of(prompts: str | list[str] | list[int] | list[list[int]]) -> list[Prompt]:
    """Return every prompt, as a text or as tokens."""
    if isinstance(prompts, str):
        return [prompts]
    # The form's validation has looked at every element of what may be millions.
    if prompts and isinstance(prompts[0], int):
        return [prompts]
    return cast("list[Prompt]", prompts)
