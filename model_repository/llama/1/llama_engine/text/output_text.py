"""A completion's text: incremental detokenization, and the stop conditions that end it.

Both are one object because a stop string cuts the text, and its possible beginning delays the next delta.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Collection, Sequence
from functools import cached_property

from llama_engine.text.partial_match import PartialMatch

_Decoder = getincrementaldecoder("utf-8")


class OutputText:
    """Collects one completion token by token until an end token, stop token, stop string or max_tokens finishes it.

    end_tokens, stop_tokens: ids that end the completion; their bytes are excluded from the text. stop_words: stop
    strings in UTF-8; the text ends before the first match. min_tokens: number of tokens before which stop strings are
    ignored (the sampler masks end and stop tokens until then).
    """

    def __init__(
        self,
        *,
        min_tokens: int,
        max_tokens: int,
        stop_words: Sequence[bytes],
        end_tokens: Collection[int],
        stop_tokens: Collection[int] = (),
    ) -> None:
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._stop_words = stop_words
        self._end_tokens = end_tokens
        self._stop_tokens = stop_tokens
        self._bytes = bytearray()
        self._decoder = _Decoder("replace")
        # The numbers of bytes that were returned by `next_delta`, and that were appended to the partial matches.
        self._returned = self._matched = 0
        self.num_tokens = 0
        self.finish_reason = ""
        self.stop_reason = ""
        """The stop string or the id of the stop token that finished the completion; empty if neither did."""

    def add(self, token: int, token_bytes: bytes, complete: bool = False) -> bool:
        """Add a token and its bytes; return whether the completion is finished. An end token counts in num_tokens.

        complete: whether the text is complete by its guide, which finishes the completion as an end token does.
        """
        self.num_tokens += 1
        if self._stop_tokens and token in self._stop_tokens and token not in self._end_tokens:
            self.finish_reason, self.stop_reason = "stop", str(token)
            return True
        checked = len(self._bytes)
        ended = token in self._end_tokens
        if not ended:
            self._bytes += token_bytes
        stopped = ended or (self.num_tokens >= self._min_tokens and self._cut_at_stop_word(checked))
        if stopped or complete:
            self.finish_reason = "stop"
        elif self.num_tokens >= self._max_tokens:
            self.finish_reason = "length"
        return bool(self.finish_reason)

    @property
    def text(self) -> str:
        """The text so far, without the stop string; invalid UTF-8, such as an incomplete character, is U+FFFD."""
        return self._bytes.decode(errors="replace")

    def next_delta(self) -> str:
        """Return the final text since the previous call; the concatenated deltas equal the finished `text`.

        Until the completion is finished, an incomplete character and a possible prefix of a stop string are held back.
        """
        end = len(self._bytes)
        if not self.finish_reason:
            for word in self._partial_matches:
                word.append(self._bytes[self._matched :])
            self._matched = end
            end -= max((word.matched for word in self._partial_matches), default=0)
        delta = self._decoder.decode(self._bytes[self._returned : end], final=bool(self.finish_reason))
        self._returned = end
        return delta

    @cached_property
    def _partial_matches(self) -> list[PartialMatch]:
        return [PartialMatch(word) for word in self._stop_words]

    def _cut_at_stop_word(self, checked: int) -> bool:
        """Cut the text before a stop string that ends after the first `checked` bytes; return whether there is one.

        Of several matches the first to end counts, not the first to begin, so that tokenization doesn't matter.
        """
        matches: list[tuple[int, int, bytes]] = []
        for word in self._stop_words:
            start = self._bytes.find(word, max(checked - len(word) + 1, 0))
            if start >= 0:
                matches.append((start + len(word), start, word))
        if not matches:
            return False
        _, start, word = min(matches)
        self.stop_reason = word.decode(errors="replace")
        del self._bytes[start:]
        return True
