"""When a completion is finished, and where its text ends.

Stop strings are matched in bytes: a match in UTF-8 starts and ends at character boundaries, however tokens split it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

from llama_engine.text.detokenizer import Detokenizer
from llama_engine.text.partial_match import PartialMatch


class StopChecker:
    """One completion: add a token at a time until it is finished by an end or stop token, a stop string or max_tokens.

    end_tokens, stop_tokens: ids that end the completion; a stop token's bytes are no part of the text. stop_words: stop
    strings in UTF-8; the text ends before the first match. min_tokens: stop strings are ignored before this many tokens
    (the sampler masks end and stop tokens until then).
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
        self._output = Detokenizer()
        # Bytes that the partial matches have seen.
        self._matched = 0
        self.num_tokens = 0
        self.finish_reason = ""
        self.stop_reason = ""
        """The stop string, or the id of the stop token, that finished the completion; empty where neither did."""

    def add(self, token: int, token_bytes: bytes, complete: bool = False) -> bool:
        """Add a token and its bytes; return whether the completion is finished. An end token counts in num_tokens.

        complete: nothing may follow this token, which finishes the completion as an end token does.
        """
        self.num_tokens += 1
        if self._stop_tokens and token in self._stop_tokens and token not in self._end_tokens:
            self.finish_reason, self.stop_reason = "stop", str(token)
            return True
        checked = len(self._output.bytes)
        self._output.bytes += token_bytes
        stopped = token in self._end_tokens or (self.num_tokens >= self._min_tokens and self._cut_at_stop_word(checked))
        if stopped or complete:
            self.finish_reason = "stop"
        elif self.num_tokens >= self._max_tokens:
            self.finish_reason = "length"
        return bool(self.finish_reason)

    @property
    def text(self) -> str:
        """The text so far, without the stop string; invalid UTF-8 becomes U+FFFD."""
        return self._output.text

    def next_delta(self) -> str:
        """Return the text that became certain since the last call; the deltas join to the finished `text`.

        Until the completion is finished, holds back an incomplete character and a possible beginning of a stop string.
        """
        if self.finish_reason:
            return self._output.next_delta(0, final=True)
        for word in self._partial_matches:
            word.append(self._output.bytes[self._matched :])
        self._matched = len(self._output.bytes)
        held_back = max((word.matched for word in self._partial_matches), default=0)
        return self._output.next_delta(held_back, final=False)

    @cached_property
    def _partial_matches(self) -> list[PartialMatch]:
        return [PartialMatch(word) for word in self._stop_words]

    def _cut_at_stop_word(self, checked: int) -> bool:
        """Cut the text before the stop string that ends first after the first `checked` bytes; return whether one does.

        The first to end, not the first to begin: so the text does not depend on its tokenization.
        """
        matches: list[tuple[int, int, bytes]] = []
        for word in self._stop_words:
            start = self._output.bytes.find(word, max(checked - len(word) + 1, 0))
            if start >= 0:
                matches.append((start + len(word), start, word))
        if not matches:
            return False
        _, start, word = min(matches)
        self.stop_reason = word.decode(errors="replace")
        del self._output.bytes[start:]
        return True
