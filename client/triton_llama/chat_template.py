"""A conversation as the text of a prompt, and that text's length: the checkpoint's tokenizer and its chat template.

The only module that needs transformers, and it imports it only when a tokenizer is loaded. Knows no server.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from triton_llama.errors import RejectedInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LARGEST_DEFAULT_CONTEXT = 4096
"""Tokens; the server's own default for `max_model_len` is capped at this too."""

Message = Mapping[str, str]
"""`role` (system, user or assistant) and `content`."""


class Template(Protocol):
    """What a conversation needs to become a prompt."""

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt that asks for the next answer."""

    def count(self, prompt: str) -> int:
        """Return how many tokens the server will make of a prompt, or one more."""


class ChatTemplate:
    """A tokenizer and the template that goes with it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str, template: str | None) -> None:
        """`source` is the tokenizer's path or hub id; `template`, in Jinja, goes over the tokenizer's own."""
        self._tokenizer = tokenizer
        self._source = source
        self._template = template

    @classmethod
    def load(cls, source: str, template_file: Path | None = None) -> ChatTemplate:
        """Load a tokenizer from a folder or the hub. Code that comes with it is never run.

        Raises:
            ModuleNotFoundError: transformers or jinja2 isn't installed.
            ValueError: there is no tokenizer, no template, or a template that isn't UTF-8.
        """
        # transformers says on import what it could do with PyTorch, which tokenizers don't need, and the hub's client
        # how often it has tried.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
        import jinja2  # noqa: F401 - transformers needs it, and says so only at the first turn
        import transformers  # noqa: F401 - who lacks it is told so

        try:
            tokenizer = _tokenizer(source)
        except Exception as error:
            # tokenizers raises bare Exceptions for files it can't read.
            raise ValueError(f"tokenizer {source!r} can't be loaded: {_first_line(error)}") from error
        try:
            template = None if template_file is None else template_file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"chat template {template_file} is not UTF-8 at byte {error.start}") from error
        if template is None and not tokenizer.chat_template:
            raise ValueError(f"tokenizer {source!r} has no chat template; --chat-template FILE gives it one")
        return cls(tokenizer, source, template)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt that asks for the next answer.

        Raises:
            RejectedInputError: the template refuses these messages, or has a fault.
        """
        from jinja2 import TemplateError

        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except TemplateError as error:
            raise RejectedInputError(f"the chat template refuses the conversation: {_first_line(error)}") from error
        return str(rendered)

    def count(self, prompt: str) -> int:
        """Return how many tokens the server will make of a prompt, or one more."""
        # One for the BOS, which the server puts before a prompt that doesn't begin with it.
        return len(self._tokenizer(prompt, add_special_tokens=False)["input_ids"]) + 1

    def default_context(self) -> int:
        """Return the tokens for prompt and answer: the checkpoint's `max_position_embeddings`, at most 4096.

        Where there is a tokenizer without its checkpoint, what the tokenizer says (`model_max_length`).
        """
        from transformers.utils.hub import cached_file

        # Not AutoConfig, which imports PyTorch: seconds, for one number.
        try:
            config = json.loads(Path(str(cached_file(self._source, "config.json"))).read_bytes())
            longest = config["max_position_embeddings"]
        except (OSError, ValueError, KeyError, TypeError):
            longest = self._tokenizer.model_max_length
        return min(int(longest), LARGEST_DEFAULT_CONTEXT)


def _tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer, without PyTorch where it has the file that needs none."""
    from transformers import PreTrainedTokenizerFast
    from transformers.utils.hub import cached_file

    tokenizer: PreTrainedTokenizerBase
    try:
        cached_file(source, "tokenizer.json")
    except OSError:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(source)
        return tokenizer
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    return tokenizer


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
