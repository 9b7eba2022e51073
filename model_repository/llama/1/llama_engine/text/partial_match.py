"""A word, and how much of its beginning a text ends with: kept up to date byte by byte (Knuth, Morris and Pratt, 1977).

Knows bytes only; what follows from a begun word is `banning`'s and `stopping`'s.
"""

from __future__ import annotations

from collections.abc import Iterator


class PartialMatch:
    """A word (not empty), and the longest part of its beginning that the text ends with."""

    def __init__(self, word: bytes) -> None:
        self._word = word
        self._begun = 0
        # _borders[n]: length of the longest proper beginning of word[:n] that word[:n] also ends with.
        self._borders = [0] * (len(word) + 1)
        for end in range(1, len(word)):
            self._borders[end + 1] = self._longer(self._borders[end], word[end])

    @property
    def begun(self) -> int:
        """Length of the longest beginning, short of the whole word, that the text ends with."""
        return self._borders[self._begun] if self._begun == len(self._word) else self._begun

    def advance(self, piece: bytes | bytearray) -> None:
        """Take the text's next bytes."""
        for byte in piece:
            self._begun = self._longer(self._begun, byte)

    def rests(self, longest: int) -> Iterator[bytes]:
        """Yield what is missing of the word after each beginning the text ends with, up to `longest` bytes of it."""
        begun = self._begun
        while begun and len(self._word) - begun <= longest:
            yield self._word[begun:]
            begun = self._borders[begun]

    def _longer(self, begun: int, byte: int) -> int:
        """Return how much of the word the text ends with, if it ended with `begun` bytes of it before this byte."""
        while begun and (begun == len(self._word) or self._word[begun] != byte):
            begun = self._borders[begun]
        return begun + 1 if self._word[begun] == byte else 0
