"""Searches the tokens of a sequence, or of finished ones, for the place where its last tokens stood before."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

MIN_MATCH = 3
"""Tokens of the sequence's end that must have stood before."""

MAX_MATCH = 32
"""Tokens up to which the lengths of two matches are compared."""

MAX_CANDIDATES = 8
"""Latest places of the last MIN_MATCH tokens among which the longest match is chosen."""

MAX_INDEXED = 4096
"""Positions indexed in one search, about 1.5 ms, so that a long prompt doesn't hold up a step."""

MAX_FINISHED = 4
"""Finished sequences of one salt and adapter that are searched."""

MAX_FINISHED_TOKENS = 1 << 16
"""Maximum tokens of all finished sequences that are kept. An indexed token takes about 200 bytes: 13 MB."""


class NgramIndex:
    """Tokens, and where each run of MIN_MATCH of them has occurred. A search first indexes at most MAX_INDEXED more."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = list(tokens)
        # The position after the latest occurrence of a run, and for each position that of the one before.
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = [0] * MIN_MATCH

    def find(self, recent: list[int]) -> tuple[int, int]:
        """Return a position whose preceding tokens `recent` ends with, and their number; the longest match, else 0, 0.

        The position has a token. recent: at least MIN_MATCH tokens.
        """
        self._index()
        position = self._latest.get(tuple(recent[-MIN_MATCH:]), 0)
        best = longest = 0
        for _ in range(MAX_CANDIDATES):
            if not position:
                break
            length = self._match(position, recent)
            if length > longest:
                best, longest = position, length
            position = self._earlier[position]
        return best, longest

    def _index(self) -> None:
        """Index the next runs that a token follows."""
        tokens, latest, earlier = self.tokens, self._latest, self._earlier
        for position in range(len(earlier), min(len(tokens), len(earlier) + MAX_INDEXED)):
            run = tuple(tokens[position - MIN_MATCH : position])
            earlier.append(latest.get(run, 0))
            latest[run] = position

    def _match(self, position: int, recent: list[int]) -> int:
        """Return how many tokens before the position are the last ones of `recent`, MIN_MATCH to MAX_MATCH."""
        tokens, bound = self.tokens, min(position, len(recent), MAX_MATCH)
        length = MIN_MATCH
        while length < bound and tokens[position - length - 1] == recent[-length - 1]:
            length += 1
        return length


class FinishedIndexes:
    """The indexes of sequences that finished lately, by `GenerationRequest.prefix_root`."""

    def __init__(self) -> None:
        self._indexes: OrderedDict[bytes, deque[NgramIndex]] = OrderedDict()
        self._tokens = 0

    def add(self, root: bytes, index: NgramIndex) -> None:
        """Keep an index, and drop the oldest of the root, and of all if they are too long together."""
        indexes = self._indexes.setdefault(root, deque())
        self._indexes.move_to_end(root)
        indexes.append(index)
        self._tokens += len(index.tokens)
        while len(indexes) > MAX_FINISHED:
            self._tokens -= len(indexes.popleft().tokens)
        while self._tokens > MAX_FINISHED_TOKENS:
            oldest, others = next(iter(self._indexes.items()))
            self._tokens -= len(others.popleft().tokens)
            if not others:
                del self._indexes[oldest]

    def get(self, root: bytes) -> Iterable[NgramIndex]:
        """Return the root's indexes, the latest first."""
        return reversed(self._indexes.get(root, ()))
