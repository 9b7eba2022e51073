"""A conversation's memory: what was said, and how much of it still fits into the context.

Knows neither tokenizer nor server: a template makes the prompts and counts their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triton_llama.chat_template import Message, Template
from triton_llama.errors import RejectedInputError


@dataclass(frozen=True)
class Exchange:
    """A message and its answer."""

    message: str
    answer: str


class Conversation:
    """What was said so far."""

    def __init__(self, template: Template, system: str | None, context: int, max_tokens: int) -> None:
        """`system` stays in front of everything; `context` is for the prompt and `max_tokens`, in tokens."""
        self._template = template
        self._system = system
        self._context = context
        self._max_tokens = max_tokens
        self._exchanges: list[Exchange] = []

    def prompt(self, message: str) -> str:
        """Return the prompt that asks for the answer to a message, after all that still fits before it.

        The exchanges that no longer fit, the oldest first, are forgotten for good.

        Raises:
            RejectedInputError: the message doesn't even fit alone, or the template refuses it; nothing is forgotten.
        """
        tokens = 0
        for first in range(len(self._exchanges) + 1):
            kept = self._exchanges[first:]
            prompt = self._template.render(self._messages(kept, message))
            tokens = self._template.count(prompt)
            if tokens + self._max_tokens <= self._context:
                self._exchanges = kept
                return prompt
        raise RejectedInputError(
            f"the message makes a prompt of {tokens} tokens and max_tokens is {self._max_tokens}, "
            f"together they must be at most the context of {self._context}"
        )

    def add(self, message: str, answer: str) -> None:
        """Remember an exchange."""
        self._exchanges.append(Exchange(message, answer))

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._exchanges = []

    def __len__(self) -> int:
        """Return how many exchanges are remembered."""
        return len(self._exchanges)

    def _messages(self, exchanges: Sequence[Exchange], message: str) -> list[Message]:
        messages: list[Message] = []
        if self._system is not None:
            messages.append({"role": "system", "content": self._system})
        for exchange in exchanges:
            messages.append({"role": "user", "content": exchange.message})
            messages.append({"role": "assistant", "content": exchange.answer})
        messages.append({"role": "user", "content": message})
        return messages
