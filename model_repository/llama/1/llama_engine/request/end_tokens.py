"""The tokens that end a completion: those that a checkpoint's files name, and those that end a turn in its templates.

The files contradict each other in many published checkpoints, and a chat that misses its end goes on by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeGuard

from llama_engine.bounds import show
from llama_engine.errors import CheckpointError
from llama_engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig

END_TOKENS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<end_of_utterance>", "<EOT>", "_<EOT>", "<|eot|>", "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "[|endofturn|]",
)  # fmt: skip
"""Tokens that end a text or a turn, of known families: llama.cpp's, and others."""


def find_end_tokens(generation: GenerationConfig, config: PreTrainedConfig, tokenizer: Tokenizer) -> Mapping[int, str]:
    """Return the ids of all end tokens with the first part of the checkpoint that has each.

    Raises CheckpointError for an id of the generation config beyond the vocabulary; others are left out.
    """
    size = len(tokenizer.vocabulary.token_bytes)
    named = _ids(generation.eos_token_id)
    if not all(_is_token(token, size) for token in named):
        raise CheckpointError(
            f"generation_config.json, or the model's config without one: eos_token_id is "
            f"{show(generation.eos_token_id)}; it must be below {size}"
        )
    sources: Mapping[str, Iterable[object]] = {
        "config": _ids(config.eos_token_id),
        "generation config": named,
        "tokenizer": _ids(tokenizer.pretrained.eos_token_id),
        "chat template": _ends_of_turns(tokenizer),
    }
    ends: dict[int, str] = {}
    for source, tokens in sources.items():
        ends |= {token: source for token in tokens if _is_token(token, size) and token not in ends}
    return ends


def describe_end_tokens(ends: Mapping[int, str], tokenizer: Tokenizer) -> str:
    """Return the end tokens with their texts and sources as one line, for the log."""
    texts = tokenizer.pretrained.convert_ids_to_tokens(list(ends))
    parts = [f"{token} {text!a} ({source})" for (token, source), text in zip(ends.items(), texts, strict=True)]
    return ", ".join(parts) or "none"


def _ids(value: object) -> list[object]:
    if isinstance(value, list):
        return value
    return [] if value is None else [value]


def _is_token(value: object, size: int) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < size


def _ends_of_turns(tokenizer: Tokenizer) -> Iterator[int]:
    """Yield the special tokens among END_TOKENS that a chat template contains."""
    templates = tokenizer.chat_templates.values()
    for token, added in tokenizer.pretrained.added_tokens_decoder.items():
        text = added.content
        if added.special and text in END_TOKENS and any(text in template for template in templates):
            yield token
