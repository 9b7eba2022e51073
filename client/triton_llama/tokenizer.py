"""A checkpoint's tokenizer with its chat template. Only this module needs transformers, and only to load one."""

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
"""Tokens; the server caps its default for `max_model_len` at this too."""

Message = Mapping[str, str]
"""`role` (system, user or assistant) and `content`."""


class Template(Protocol):
    """What a conversation needs to become a prompt."""

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt that asks for the next answer."""

    def count(self, prompt: str) -> int:
        """Return the number of tokens of a prompt on the server, or one more."""


class ChatTemplate:
    """A tokenizer, its path or hub id, and a Jinja template that overrides the tokenizer's own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str, template: str | None) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._template = template

    @classmethod
    def load(cls, source: str, template_file: Path | None = None) -> ChatTemplate:
        """Load a tokenizer from a folder or the hub. Code that comes with it is never run.

        Raises:
            ValueError: a missing package, tokenizer or template, or a template that isn't UTF-8.
        """
        # transformers' hints about PyTorch, which tokenizers don't need, and the hub client's about its retries.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
        try:
            import jinja2  # noqa: F401 - transformers imports it only for the first prompt
            import transformers  # noqa: F401 - fails here if it is missing

            tokenizer = _load(source)
            template = None if template_file is None else template_file.read_text(encoding="utf-8")
        except ModuleNotFoundError as error:
            raise ValueError(f"chat needs the package {error.name}: pip install '.[chat]' in the checkout") from error
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

        said = [dict(message) for message in messages]
        try:
            prompt = self._tokenizer.apply_chat_template(
                said, chat_template=self._template, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise RejectedInputError(f"the chat template refuses the conversation: {_first_line(error)}") from error
        return str(prompt)

    def count(self, prompt: str) -> int:
        """Return the number of tokens of a prompt on the server, or one more."""
        # One for the BOS token, which the server adds to a prompt that doesn't begin with it.
        return len(self._tokenizer(prompt, add_special_tokens=False)["input_ids"]) + 1

    def default_context(self) -> int:
        """Return the tokens for prompt and answer: the checkpoint's `max_position_embeddings`, at most 4096.

        For a tokenizer without its checkpoint, the tokenizer's `model_max_length`.
        """
        from transformers.utils.hub import cached_file

        # Not AutoConfig, which imports PyTorch: seconds, for one number.
        try:
            config = json.loads(Path(str(cached_file(self._source, "config.json"))).read_bytes())
            longest = config["max_position_embeddings"]
        except (OSError, ValueError, KeyError, TypeError):
            longest = self._tokenizer.model_max_length
        return min(int(longest), LARGEST_DEFAULT_CONTEXT)


def _load(source: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer, without PyTorch if it has a `tokenizer.json`; raises ValueError if it can't be loaded."""
    from transformers import PreTrainedTokenizerFast
    from transformers.utils.hub import cached_file

    tokenizer: PreTrainedTokenizerBase
    try:
        try:
            cached_file(source, "tokenizer.json")
        except OSError:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(source)
        else:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    except Exception as error:
        # tokenizers raises bare Exceptions for files it can't read.
        raise ValueError(f"tokenizer {source!r} can't be loaded: {_first_line(error)}") from error
    return tokenizer


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
