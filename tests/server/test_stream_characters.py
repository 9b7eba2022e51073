"""Streams of a model whose every token is a part of a character: only whole characters go out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from server.clients import ask, at_once, generate
from server.fleet import Fleet
from server.streams import STREAM_WIRES, both
from triton_local.server import LocalTriton

HOT = {"text_input": "Return", "max_tokens": 30, "min_tokens": 30, "temperature": 2.0, "top_p": 1.0, "top_k": 0}
SNAKE, BROKEN = "🐍", "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def split(fleet: Fleet) -> Iterator[LocalTriton]:
    with fleet.server("split") as server:
        yield server


def test_a_part_of_a_character_is_sent(split: LocalTriton) -> None:
    jobs = [partial(both, split, STREAM_WIRES[seed % 3], **HOT, seed=seed) for seed in range(24)]
    results = at_once(jobs)
    texts = [whole.text for whole, _ in results]
    for character in (SNAKE, "é", BROKEN):
        assert any(character in text for text in texts), f"no {character!r} was made: {texts}"
    pieces = [piece for _, streamed in results for piece in streamed.pieces]
    assert any(piece.text == SNAKE and piece.num_output_tokens > 1 for piece in pieces)


def test_a_text_that_ends_in_the_middle_of_a_character_ends_differently(split: LocalTriton) -> None:
    """Cut after every number of tokens, some cuts go through a character."""
    limits = range(1, 25)
    cut = HOT | {"min_tokens": 0, "seed": 2}
    jobs = [partial(both, split, STREAM_WIRES[limit % 3], **cut | {"max_tokens": limit}) for limit in limits]
    last = [streamed.pieces[-1].text for _, streamed in at_once(jobs)]
    assert any(text.endswith(BROKEN) for text in last)


@pytest.mark.parametrize("word", [SNAKE, f"{SNAKE} ", f" {SNAKE}", "é"])
def test_a_stop_word_in_parts_is_sent(split: LocalTriton, word: str) -> None:
    requests = [HOT | {"seed": seed, "min_tokens": 0, "stop_words": [word]} for seed in range(12)]
    without = [partial(ask, split, generate, **request | {"stop_words": [""]}) for request in requests]
    known = [answer.text for answer in at_once(without)]
    results = at_once([partial(both, split, STREAM_WIRES[index % 3], **one) for index, one in enumerate(requests)])
    stopped = 0
    for text, (whole, _) in zip(known, results, strict=True):
        assert word not in whole.text
        if word in text:
            stopped += 1
            # An end within a broken character may show it in fewer marks.
            assert text.startswith(whole.text.rstrip(BROKEN))
            assert whole.finish_reason == "stop"
    assert stopped, f"no text had {word!r}: {known}"
