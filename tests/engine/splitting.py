"""Every way to split bytes into tokens."""

from collections.abc import Iterator
from itertools import product


def splits(text: bytes) -> Iterator[list[bytes]]:
    """Yield all 2^(n-1) ways to cut n bytes into pieces that are not empty."""
    for cuts in product((False, True), repeat=len(text) - 1):
        pieces, start = [], 0
        for position, cut in enumerate(cuts, 1):
            if cut:
                pieces.append(text[start:position])
                start = position
        yield [*pieces, text[start:]]
