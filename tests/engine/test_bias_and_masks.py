"""Masks of one sequence: beside a guide, and bad words against their definition.

A bad word bans a token if the text followed by it would contain the word.
"""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from llama_engine.guides.matcher import GuideState
from llama_engine.sampling.bias_and_masks import BadWords, LogitsProcessor, forbidden
from llama_engine.text.tokenizer import Vocabulary
from numpy.typing import NDArray

CPU = torch.device("cpu")
SIZE, END = 40, 3
SHORT = [b"", b"a", b"b", b"aab"]


class _Alternating(GuideState):
    """A guide that allows even tokens first, then odd ones, and so on. The text may end after two."""

    finished = False

    def __init__(self) -> None:
        self._count = 0

    @property
    def may_end(self) -> bool:
        return self._count == 2

    def fill(self, allowed: NDArray[np.int32]) -> None:
        allowed.fill(0)
        for token in range(self._count % 2, SIZE, 2):
            # Bit 31 is the sign.
            allowed.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token: int) -> bool:
        self._count += 1
        return token % 2 != self._count % 2


def _left(processor: LogitsProcessor, too_early: bool = False) -> set[int]:
    """Return the tokens that masks leave."""
    logits, allowed = torch.zeros(SIZE), torch.zeros(1, 2, dtype=torch.int32)
    processor.fill(allowed[0].numpy())
    logits.masked_fill_(forbidden(allowed, SIZE)[0], -torch.inf)
    processor.mask(logits, too_early)
    assert processor.leaves_nothing(too_early) == (not logits.isfinite().any())
    return set(logits.isfinite().nonzero()[:, 0].tolist())


@pytest.mark.parametrize(
    ("options", "at_first", "at_its_end", "too_early"),
    [
        # Without a token left, a text ends only where its guide lets it.
        ({"allowed": [1], "ends": [END]}, set(), {END}, {END}),
        # Stop tokens come only where the text may end.
        ({"allowed": [2, 4, 5, END], "ends": [END, 4, 5], "stops": [4, 5]}, {2}, {2, 4, 5, END}, {2}),
        # An ignored end token is an ordinary one, which the guide itself asks for.
        ({"allowed": [0, 2, 5], "ends": [5], "ignored": [2]}, {0, 2}, {0, 5}, {0}),
        # Bits 31 and 32 are of two words.
        ({"allowed": [30, 31, 32, 33], "ends": [END]}, {30, 32}, {30, 32}, {30, 32}),
    ],
    ids=["end tokens", "stop tokens", "ignored end tokens", "two words of bits"],
)
def test_tokens_that_end_a_text_come_only_where_its_guide_may_end(
    options: dict[str, list[int]], at_first: set[int], at_its_end: set[int], too_early: set[int]
) -> None:
    processor = LogitsProcessor(SIZE, CPU, **options)  # type: ignore[arg-type]
    processor.follow_guide(_Alternating())
    assert _left(processor) == _left(processor, too_early=True) == at_first
    processor.append(0, b"a")
    processor.append(1, b"b")
    assert _left(processor) == at_its_end
    assert _left(processor, too_early=True) == too_early


def _banned(words: list[bytes], vocabulary: Vocabulary, tokens: Sequence[bytes]) -> list[int]:
    """Return the ids banned after a text of these tokens."""
    bad_words = BadWords(words, vocabulary, CPU)
    for token in tokens:
        bad_words.append(token)
    return sorted({*bad_words.always.tolist(), *bad_words.completing().tolist()})


@pytest.mark.parametrize("alphabet", [b"ab", b"a\xff", b"\xfe\xff"])
def test_exactly_the_tokens_that_would_complete_a_bad_word_are_banned(alphabet: bytes) -> None:
    """On a small alphabet, in which words overlap with themselves; \\xff is the last of all bytes."""
    randomness = random.Random(5)
    tokens = [b"", *sorted({bytes(randomness.choices(alphabet, k=randomness.randint(1, 4))) for _ in range(200)})]
    vocabulary = Vocabulary(tokens)
    for _ in range(300):
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
