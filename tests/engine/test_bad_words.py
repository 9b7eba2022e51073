"""Bad words against the definition: a token is banned if the text followed by it would contain the word."""

import random
from collections.abc import Sequence

import pytest
import torch
from llama_engine.sampling.bias_and_masks import BadWords
from llama_engine.text.tokenizer import Vocabulary

SHORT = [b"", b"a", b"b", b"aab"]


def _banned(words: list[bytes], vocabulary: Vocabulary, tokens: Sequence[bytes]) -> list[int]:
    """Return the ids banned after a text of these tokens."""
    bad_words = BadWords(words, vocabulary, torch.device("cpu"))
    for token in tokens:
        bad_words.append(token)
    return sorted({*bad_words.always.tolist(), *bad_words.completing().tolist()})


@pytest.mark.parametrize("alphabet", [b"ab", b"a\xff", b"\xfe\xff"])
def test_exactly_the_tokens_that_would_complete_a_bad_word_are_banned(alphabet: bytes) -> None:
    """On a small alphabet, in which words overlap with themselves; \\xff is the last of all bytes."""
    randomness = random.Random(5)
    tokens = [b"", *sorted({bytes(randomness.choices(alphabet, k=randomness.randint(1, 4))) for _ in range(200)})]
    vocabulary = Vocabulary(tokens)
    for _ in range(1500):
        words = [bytes(randomness.choices(alphabet, k=randomness.randint(1, 6))) for _ in range(2)]
        text = bytes(randomness.choices(alphabet, k=randomness.randint(0, 8)))
        if any(word in text for word in words):
            continue
        cut = randomness.randint(0, len(text))
        expected = [index for index, token in enumerate(tokens) if any(word in text + token for word in words)]
        assert _banned(words, vocabulary, [text[:cut], b"", text[cut:]]) == expected, (words, text)


@pytest.mark.parametrize(
    ("word", "length", "expected"),
    [(b"a" * 100_000 + b"b", 50, []), (b"a" * 1000 + b"b", 999, [3]), (b"a" * 1000 + b"b", 1200, [2, 3])],
)
def test_a_long_bad_word_bans_only_the_tokens_that_complete_it(word: bytes, length: int, expected: list[int]) -> None:
    assert _banned([word], Vocabulary(SHORT), [b"a"] * length) == expected
