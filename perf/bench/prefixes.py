"""Loads whose prompts share prefixes, of random words (`perf.checkpoint.word`): a word is a token.

- **chat**: eight turns, all chats with the same system prompt. A turn's prompt is the whole chat so far. The warm-up's
  chats have one to eight turns, lest all users be at the same turn.
- **retrieval**: a long document, the same for all, and a question.
- **unshared**: no prefix in common; what the cache costs where it never helps.

Every load has words of its own, so that the cache has nothing of the loads before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from transformers import LlamaConfig

from perf.checkpoint import SPECIAL_TOKENS, word
from perf.load.protocols import Request
from perf.load.workload import Load

POSITIONS = 4096
"""Of the checkpoints."""
SYSTEM_TOKENS, TURNS, MESSAGE_TOKENS, ANSWER_TOKENS = 600, 8, (20, 60), (30, 90)
DOCUMENT_TOKENS, QUESTION_TOKENS, FINDING_TOKENS = 3000, (20, 40), 40
UNSHARED_TOKENS, UNSHARED_ANSWER = (550, 650), (30, 90)
Bounds = tuple[int, int]


def load(model: str, mix: Literal["chat", "retrieval", "unshared"], users: int, measured: int) -> Load:
    """Return a load for a checkpoint of words. measured: chats or requests after a warm-up of one per user."""
    key, count = f"prefixes/{model}/{mix}/{users}", users + measured

    def chosen(checkpoint: Path) -> tuple[list[Request], int]:
        words = _Words(key, LlamaConfig.from_pretrained(checkpoint).vocab_size)
        if mix == "chat":
            system = words.text(SYSTEM_TOKENS)
            warmup = [turn for user in range(users) for turn in words.chat(system, 1 + user % TURNS)]
            return [*warmup, *(turn for _ in range(measured) for turn in words.chat(system, TURNS))], len(warmup)
        if mix == "unshared":
            return [Request(words.some(UNSHARED_TOKENS), words.number(UNSHARED_ANSWER)) for _ in range(count)], users
        document = words.text(DOCUMENT_TOKENS)
        return [Request(document + words.some(QUESTION_TOKENS), FINDING_TOKENS) for _ in range(count)], users

    return Load(key, mix, users, chosen)


class _Words:
    """Random words, deterministic by `seed`."""

    def __init__(self, seed: str, vocabulary: int) -> None:
        self._random = random.Random(seed)
        self._vocabulary = vocabulary

    def number(self, bounds: Bounds) -> int:
        return self._random.randint(*bounds)

    def text(self, tokens: int) -> str:
        return "".join(word(self._random.randrange(SPECIAL_TOKENS, self._vocabulary)) for _ in range(tokens))

    def some(self, bounds: Bounds) -> str:
        return self.text(self.number(bounds))

    def chat(self, system: str, turns: int) -> Iterator[Request]:
        for turn in range(1, turns + 1):
            message = self.some(MESSAGE_TOKENS)
            yield Request(system + message if turn == 1 else message, self.number(ANSWER_TOKENS), turn)


SMALL_LOADS = [
    *(load("small", "chat", users, measured) for users, measured in ((1, 6), (8, 24), (32, 64))),
    *(load("small", "retrieval", users, measured) for users, measured in ((1, 16), (8, 32), (32, 96))),
    *(load("small", "unshared", users, measured) for users, measured in ((1, 24), (8, 64), (32, 128))),
]
# Without a cache, 32 users of the larger model would take half an hour of prefill on two cores.
LARGE_LOADS = [
    *(load("large", "chat", users, measured) for users, measured in ((1, 2), (8, 8))),
    *(load("large", "retrieval", users, measured) for users, measured in ((1, 4), (8, 12))),
    *(load("large", "unshared", users, measured) for users, measured in ((1, 4), (8, 16))),
]
