"""The description that the engine gives of the model it serves (docs/api.md), as far as servers in front read it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Adapter(BaseModel):
    """A LoRA adapter that is loaded beside the model. digest: of its weights; another version has another one."""

    model_config = ConfigDict(frozen=True)

    name: str
    digest: str


class Description(BaseModel):
    """What a server in front of Triton needs of a checkpoint. tokenizer: the content of a tokenizer.json.

    checkpoint_defaults: names of the parameters whose default the checkpoint's generation config has.
    """

    model_config = ConfigDict(frozen=True)

    digest: str
    format: Literal[1]
    name: str
    model_type: str
    vocabulary: int
    max_model_len: int
    end_token_ids: tuple[int, ...]
    special_tokens: dict[str, object]
    chat_templates: dict[str, str]
    tokenizer: str
    tokenizer_class: str
    checkpoint_defaults: frozenset[str]
