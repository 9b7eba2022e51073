"""When a row ends, and what of its text counts.

Knows one row's bytes so far, its stop words and its limits. Works on bytes: UTF-8 matches at character borders only, so
a stop word is found wherever tokens happen to split it, and a character split over tokens is decoded once it is whole.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Collection, Sequence
from functools import cached_property

from llama_engine.text.partial_match import PartialMatch

_Decoder = getincrementaldecoder("utf-8")


class StopChecker:
    """One row's completion: grows by a token at a time and says when it is over.

    end_tokens: ids that end the text. stop_words: UTF-8; the text ends before the first one.
    min_tokens: before so many tokens no stop word counts (end tokens are masked out of the logits until then).
    """

    def __init__(
        self, *, min_tokens: int, max_tokens: int, stop_words: Sequence[bytes], end_tokens: Collection[int]
    ) -> None:
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._stop_words = stop_words
        self._end_tokens = end_tokens
        self._bytes = bytearray()
        self._decoder = _Decoder("replace")
        # Bytes of the text that `next_delta` has looked for stop words, and given away.
        self._watched = 0
        self._taken = 0
        self.num_tokens = 0
        self.finish_reason = ""

    def add(self, token: int, piece: bytes) -> bool:
        """Take the next token and its bytes; return whether the row has ended. The ending token counts as a token."""
        self.num_tokens += 1
        seen = len(self._bytes)
        self._bytes += piece
        if token in self._end_tokens or (self.num_tokens >= self._min_tokens and self._cut_at_stop_word(seen)):
            self.finish_reason = "stop"
        elif self.num_tokens >= self._max_tokens:
            self.finish_reason = "length"
        return bool(self.finish_reason)

    @property
    def text(self) -> str:
        """The text so far; bytes that are no UTF-8, the first half of a character among them, become U+FFFD."""
        return self._bytes.decode(errors="replace")

    def next_delta(self) -> str:
        """Return what has become certain since the last call; all pieces together are the text of the ended row.

        Uncertain, until the row ends, are the first half of a character and what may be the beginning of a stop word.
        """
        ended = bool(self.finish_reason)
        certain = len(self._bytes)
        if not ended:
            for word in self._begun_stop_words:
                word.advance(self._bytes[self._watched :])
            self._watched = certain
            certain -= max((word.begun for word in self._begun_stop_words), default=0)
        piece = self._decoder.decode(self._bytes[self._taken : certain], final=ended)
        self._taken = certain
        return piece

    @cached_property
    def _begun_stop_words(self) -> list[PartialMatch]:
        return [PartialMatch(word) for word in self._stop_words]

    def _cut_at_stop_word(self, seen: int) -> bool:
        """Cut the text before the stop word that is complete first behind the first `seen` bytes.

        The first to end and not the first to begin, so that the text is the same however it was split into tokens.
        """
        found: list[tuple[int, int]] = []
        for word in self._stop_words:
            start = self._bytes.find(word, max(seen - len(word) + 1, 0))
            if start >= 0:
                found.append((start + len(word), start))
        if not found:
            return False
        _, start = min(found)
        del self._bytes[start:]
        return True
