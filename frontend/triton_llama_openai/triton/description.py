"""The description that the model gives of itself (docs/api.md), as far as servers in front read it."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter


class Adapter(BaseModel):
    """A LoRA adapter that is loaded beside the model. digest: of its weights; another version has another one."""

    model_config = ConfigDict(frozen=True)

    name: str
    digest: str


class Description(BaseModel):
    """What a server in front of Triton needs of a checkpoint. tokenizer: the content of a tokenizer.json.

    tasks: what the model is for, generate and embed; a server of a version without embeddings doesn't say it.
    checkpoint_defaults: names of the parameters whose default the checkpoint's generation config has. serving: lines
    for people by label; a server of an older version has none.
    """

    model_config = ConfigDict(frozen=True)

    digest: str
    format: Literal[1]
    name: str
    model_type: str
    vocabulary: int
    max_model_len: int
    embedding_size: int = 0
    tasks: tuple[str, ...] = ("generate",)
    end_token_ids: tuple[int, ...]
    special_tokens: dict[str, object]
    chat_templates: dict[str, str]
    tokenizer: str
    tokenizer_class: str
    checkpoint_defaults: frozenset[str]
    serving: dict[str, str] = {}


ADAPTERS = TypeAdapter(list[Adapter])


def parse_description(text: str, known_digest: str) -> tuple[Description | None, list[Adapter]]:
    """Return the description of an answer, None for the known one, and the loaded adapters. Raises ValidationError."""
    fields = json.loads(text)
    # A server of a version without adapters lists none.
    adapters = ADAPTERS.validate_python(fields.pop("adapters", []))
    return None if fields.get("digest") == known_digest else Description.model_validate(fields), adapters
