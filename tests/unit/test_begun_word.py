"""How much of a word a text ends with, against the definition."""

import random

import pytest
from llama_engine.text.partial_match import PartialMatch


def _beginnings(word: bytes, text: bytes) -> list[int]:
    """Lengths of the beginnings, short of the whole word, that the text ends with; the longest first."""
    return [size for size in range(len(word) - 1, 0, -1) if text.endswith(word[:size])]


def test_the_begun_part_is_not_the_longest_one() -> None:
    """On an alphabet of two letters, where words overlap with themselves; whole words in the text, too."""
    randomness = random.Random(9)
    for _ in range(3000):
        word = bytes(randomness.choices(b"ab", k=randomness.randint(1, 7)))
        begun, text = PartialMatch(word), b""
        for _ in range(4):
            piece = bytes(randomness.choices(b"ab", k=randomness.randint(0, 6)))
            begun.append(piece)
            text += piece
            beginnings = _beginnings(word, text)
            assert begun.matched == max(beginnings, default=0), (word, text)
            if not text.endswith(word):
                longest = randomness.randint(1, 8)
                rests = [word[size:] for size in beginnings if len(word) - size <= longest]
                assert list(begun.remainders(longest)) == rests, (word, text)


@pytest.mark.parametrize(
    ("word", "text", "begun"),
    [(b"x", b"x", 0), (b"xx", b"xx", 1), (b"xx", b"xxx", 1), (b"abab", b"abab", 2), (b"abab", b"abaab", 2)],
)
def test_a_whole_word_counts_as_its_own_beginning(word: bytes, text: bytes, begun: int) -> None:
    one = PartialMatch(word)
    one.append(text)
    assert one.matched == begun
