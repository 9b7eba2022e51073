"""Special tokens that clients spell out in a conversation are text, so that no message opens a turn of another role.

Before the template renders a conversation, `hide` replaces special tokens in the client's texts by placeholders. A
prompt with placeholders is tokenized here, by a copy of the tokenizer whose special tokens have secret names: those
that the template wrote are renamed, and the placeholders become the client's text again.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from tokenizers import AddedToken, Tokenizer

from triton_llama_openai.errors import ApiError

Values = TypeVar("Values")

_PLACEHOLDER = re.compile("[0-9a-f]{32}x[0-9]+x")


@dataclass(frozen=True)
class RenderedPrompt:
    """A conversation as the template renders it. placeholders: in `rendered`, and the special token of each."""

    rendered: str
    placeholders: Mapping[str, str]

    @property
    def text(self) -> str:
        """The prompt as text, in which clients' special tokens look like the template's."""
        return self.restore(self.rendered)

    def restore(self, text: str) -> str:
        """Return a text with its placeholders replaced."""
        return _PLACEHOLDER.sub(lambda match: self.placeholders.get(match[0], match[0]), text)


class SpecialTokenGuard:
    """Keeps a tokenizer's special tokens out of clients' texts.

    turn_text: short conversations as the chat templates render them. Added tokens in it that begin with a bracket mark
    turns: they are special, whether declared so or not.
    """

    def __init__(self, tokenizer: Tokenizer, turn_text: str) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        names = [token.content for token in added if token.special or _marks_turns(token.content, turn_text)]
        self._secret_names = {name: f"<{secrets.token_hex(16)}>" for name in names}
        self._names = re.compile(_any_of(names) if names else "(?!)")

    def hide(self, values: Values) -> tuple[Values, dict[str, str]]:
        """Return values whose texts have placeholders for special tokens, and the token of each placeholder."""
        secret, placeholders = secrets.token_hex(16), dict[str, str]()

        def placeholder(match: re.Match[str]) -> str:
            return placeholders.setdefault(match[0], f"{secret}x{len(placeholders)}x")

        hidden = _map_texts(values, lambda text: self._names.sub(placeholder, text))
        return hidden, {text: name for name, text in placeholders.items()}

    def encode(self, prompt: RenderedPrompt, add_special_tokens: bool) -> list[int]:
        """Return a prompt's tokens, as `PromptTokenizer.encode` does.

        Raises:
            ApiError: the tokenizer has special tokens as words, too, and takes the client's text as one.
        """
        renamed, ids, words = self._renamed
        text = self._names.sub(lambda match: self._secret_names[match[0]], prompt.rendered)
        (encoded,) = renamed.encode_batch([prompt.restore(text)], add_special_tokens=add_special_tokens)
        # The mask has the tokens that the tokenizer puts around the text.
        tokens = list(zip(encoded.ids, encoded.special_tokens_mask, strict=True))
        if any(token in words and not around for token, around in tokens):
            message = "messages have special tokens, which this model's tokenizer can't take as text"
            raise ApiError(400, message, "messages", "invalid_value")
        # The post-processor is the original's, and so are the ids that it adds.
        return [token if around else ids.get(token, token) for token, around in tokens]

    @cached_property
    def _renamed(self) -> tuple[Tokenizer, dict[int, int], set[int]]:
        """The tokenizer with secret names, the original id of each added token, the ids of special tokens as words."""
        original = self._tokenizer
        renamed = Tokenizer(original.model)
        for component in ("normalizer", "pre_tokenizer", "post_processor"):
            if (value := getattr(original, component)) is not None:
                setattr(renamed, component, value)
        tokens = {
            number: AddedToken(
                self._secret_names.get(token.content, token.content),
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
            for number, token in original.get_added_tokens_decoder().items()
        }
        renamed.add_special_tokens([token for token in tokens.values() if token.special])
        renamed.add_tokens([token for token in tokens.values() if not token.special])
        ids = {
            new: number for number, token in tokens.items() if (new := renamed.token_to_id(token.content)) is not None
        }
        words = {renamed.token_to_id(name) for name in self._secret_names}
        return renamed, ids, {word for word in words if word is not None}


def _marks_turns(name: str, turn_text: str) -> bool:
    # Gemma's line ends are added tokens, too.
    return name.startswith(("<", "[")) and name in turn_text


def _any_of(names: Sequence[str]) -> str:
    """Return a regular expression of the longest of these names, each branch of which begins with another character."""
    first, last = min(names), max(names)
    differing = (index for index, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    prefix = first[: next(differing, len(first))]
    branches: dict[str, list[str]] = {}
    for name in names:
        if rest := name.removeprefix(prefix):
            branches.setdefault(rest[0], []).append(rest)
    if not branches:
        return re.escape(prefix)
    choice = f"(?:{'|'.join(map(_any_of, branches.values()))})"
    return re.escape(prefix) + choice + ("?" if prefix in names else "")


def _map_texts(values: Values, change: Callable[[str], str]) -> Values:
    """Return JSON with its texts, names included, changed."""
    changed: object = values
    if isinstance(values, str):
        changed = change(values)
    elif isinstance(values, dict):
        changed = {change(name): _map_texts(value, change) for name, value in values.items()}
    elif isinstance(values, list | tuple):
        changed = type(values)(_map_texts(value, change) for value in values)
    return changed  # type: ignore[return-value]  # of the same type
