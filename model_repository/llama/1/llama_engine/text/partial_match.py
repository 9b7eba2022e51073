"""Incremental matching, KMP over bytes, of a stop string or a bad word: a token may end within it.

In valid UTF-8, a match of whole characters starts and ends at character boundaries.
"""

from __future__ import annotations

from collections.abc import Iterator


class PartialMatch:
    """Matches one word (not empty) against the end of a growing text.

    Reads each byte once (Knuth, Morris, Pratt): a request whose 64 words nearly match must not slow the others' steps.
    """

    def __init__(self, word: bytes) -> None:
        self._word = word
        self._matched = 0
        # _borders[n]: length of the longest proper prefix of word[:n] that is also a suffix of word[:n].
        self._borders = [0] * (len(word) + 1)
        for end in range(1, len(word)):
            self._borders[end + 1] = self._extend(self._borders[end], word[end])

    @property
    def matched(self) -> int:
        """Length of the word's longest proper prefix that the text ends with."""
        return self._borders[self._matched] if self._matched == len(self._word) else self._matched

    def append(self, text: bytes | bytearray) -> None:
        """Append bytes to the text."""
        for byte in text:
            self._matched = self._extend(self._matched, byte)

    def remainders(self, max_bytes: int) -> Iterator[bytes]:
        """Yield the rest of the word after each prefix that the text ends with, without rests over `max_bytes`."""
        matched = self._matched
        while matched and len(self._word) - matched <= max_bytes:
            yield self._word[matched:]
            matched = self._borders[matched]

    def _extend(self, matched: int, byte: int) -> int:
        """Return the length of the match after appending a byte. matched: the length before."""
        while matched and (matched == len(self._word) or self._word[matched] != byte):
            matched = self._borders[matched]
        return matched + 1 if self._word[matched] == byte else 0
