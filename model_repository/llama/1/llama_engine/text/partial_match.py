"""How much of a stop string or of a bad word a text ends with. In bytes, because a token may end within a character."""

from __future__ import annotations

from collections.abc import Iterator


def partial_matches(text: bytes | bytearray, word: bytes) -> Iterator[int]:
    """Yield the lengths of the word's proper prefixes that the text ends with, the longest first."""
    start = text.find(word[:1], max(len(text) - len(word) + 1, 0))
    while start >= 0:
        if word.startswith(text[start:]):
            yield len(text) - start
        start = text.find(word[:1], start + 1)
