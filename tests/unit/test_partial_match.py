"""How much of a word a growing text ends with, against the definition."""

import random

import pytest
from llama_engine.text.partial_match import PartialMatch


def test_the_match_is_the_longest_proper_prefix_that_the_text_ends_with() -> None:
    """On an alphabet of two letters, in which words overlap with themselves; whole words occur in the text, too."""
    randomness = random.Random(9)
    for _ in range(3000):
        word = bytes(randomness.choices(b"ab", k=randomness.randint(1, 7)))
        match, text = PartialMatch(word), b""
        for _ in range(4):
            appended = bytes(randomness.choices(b"ab", k=randomness.randint(0, 6)))
            match.append(appended)
            text += appended
            prefixes = [size for size in range(len(word) - 1, 0, -1) if text.endswith(word[:size])]
            assert match.matched == max(prefixes, default=0), (word, text)
            if not text.endswith(word):
                longest = randomness.randint(1, 8)
                remainders = [word[size:] for size in prefixes if len(word) - size <= longest]
                assert list(match.remainders(longest)) == remainders, (word, text)


@pytest.mark.parametrize(
    ("word", "text", "matched"),
    [(b"x", b"x", 0), (b"xx", b"xx", 1), (b"xx", b"xxx", 1), (b"abab", b"abab", 2), (b"abab", b"abaab", 2)],
)
def test_a_whole_word_is_not_its_own_proper_prefix(word: bytes, text: bytes, matched: int) -> None:
    match = PartialMatch(word)
    match.append(text)
    assert match.matched == matched
