"""Canaries: strings that belong to one request, and that are found wherever they come up again."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from functools import cache

from server.servers import EMBEDDED
from tokenizers import Tokenizer

PHRASE = 4
"""Words of a prompt's phrase: of 800 words, so none comes twice, and the model writes none by chance."""

_SHAPE = re.compile(rb"qx(\d{6})([a-z]+?)zq", re.IGNORECASE)
_WORD = re.compile(rb"[a-z]{4,}")

SECRET = frozenset({"key", "header"})
"""Kinds that no response has, not even their own request's."""

Found = tuple[int, str]
"""The number of a request, and the kind of its canary: what the client wrote it into."""


def canary(number: int, kind: str) -> str:
    """Return the canary of a kind of a request: letters and digits, so that no encoding changes it."""
    return f"qx{number:06}{kind}zq"


@cache
def tokenizer() -> Tokenizer:
    """Return the served checkpoint's tokenizer."""
    return Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))


@cache
def vocabulary() -> tuple[str, ...]:
    """Return the words that are one token each, so that the model can write them."""
    names = {name[1:] for name in tokenizer().get_vocab() if name.startswith("Ġ")}
    # With a "stop" behind it, this one is an order to faulty_model.py.
    names.discard("default")
    return tuple(
        sorted(name for name in names if len(name) >= 4 and name.isascii() and name.isalpha() and name.islower())
    )


class Phrases:
    """The phrases of all prompts, by the request that has them."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._owners: dict[tuple[bytes, ...], int] = {}

    def new(self, number: int) -> str:
        """Return a phrase that no other request has."""
        words = self._draw.sample(vocabulary(), PHRASE)
        phrase = tuple(word.encode() for word in words)
        assert phrase not in self._owners
        self._owners[phrase] = number
        return " ".join(words)

    def found_in(self, data: bytes) -> set[Found]:
        """Return every phrase and every other canary that is in the bytes."""
        words = _WORD.findall(data)
        windows = (tuple(words[start : start + PHRASE]) for start in range(len(words) - PHRASE + 1))
        phrases = {(self._owners[window], "phrase") for window in windows if window in self._owners}
        return phrases | {(int(number), kind.decode().lower()) for number, kind in _SHAPE.findall(data)}


def foreign(found: Iterable[Found], number: int) -> list[Found]:
    """Return those that are another request's, or that no response may have."""
    return sorted(one for one in found if one[0] != number or one[1] in SECRET)
