"""Incremental detokenization: token bytes to text, and to deltas whose concatenation is the text."""

from __future__ import annotations

from codecs import getincrementaldecoder

_Decoder = getincrementaldecoder("utf-8")


class Detokenizer:
    """Decodes token bytes as UTF-8. Invalid bytes become U+FFFD. Deltas hold back an incomplete character."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self._decoder = _Decoder("replace")
        self._returned = 0

    @property
    def text(self) -> str:
        """The text so far; an incomplete character at its end is U+FFFD."""
        return self.bytes.decode(errors="replace")

    def next_delta(self, held_back: int, final: bool) -> str:
        """Return the text since the previous call, without the last `held_back` bytes and an incomplete character.

        final: no more bytes follow, so an incomplete character becomes U+FFFD.
        """
        end = len(self.bytes) - held_back
        delta = self._decoder.decode(self.bytes[self._returned : end], final=final)
        self._returned = end
        return delta
