"""The pieces of a stream, joined, are the text that one response would have had, however it is cut into tokens."""

from __future__ import annotations

import random
from functools import partial

import pytest
from engine.prompts import reference_text
from server.clients import ask, at_once, generate
from server.streams import STREAM_WIRES, StreamWire, both, every_wire, stream
from triton_local.server import LocalTriton

PROMPT = "Return a list of the"
GREEDY = {"text_input": PROMPT, "max_tokens": 24, "temperature": 0.0, "repetition_penalty": 1.2}
HOT = {"text_input": PROMPT, "max_tokens": 60, "min_tokens": 60, "temperature": 2.0, "top_p": 1.0, "top_k": 0}


@every_wire
def test_greedy_pieces_are_not_the_text(streaming: LocalTriton, wire: StreamWire) -> None:
    whole, streamed = both(streaming, wire, **GREEDY)
    assert len(streamed.pieces) > 1, f"{whole} came in one piece"


@every_wire
@pytest.mark.parametrize("seed", [1, 2**64 - 1])
def test_seeded_pieces_are_not_the_text(streaming: LocalTriton, wire: StreamWire, seed: int) -> None:
    whole, streamed = both(streaming, wire, **HOT, seed=seed)
    assert whole.num_output_tokens == 60
    assert len(streamed.pieces) > 1


@every_wire
def test_pieces_of_one_token_are_the_last_ones(streaming: LocalTriton, wire: StreamWire) -> None:
    whole, streamed = both(streaming, wire, **GREEDY | {"max_tokens": 1})
    assert len(streamed.pieces) == 1
    assert (whole.num_output_tokens, whole.finish_reason) == (1, "length")


@every_wire
def test_the_prompt_is_not_the_beginning_of_the_first_piece(streaming: LocalTriton, wire: StreamWire) -> None:
    prompt = "Wäre 🐍 in"
    whole, streamed = both(streaming, wire, **HOT | {"text_input": prompt}, seed=3, exclude_input_in_output=False)
    alone = stream(streaming, wire, **HOT | {"text_input": prompt}, seed=3).whole
    assert streamed.pieces[0].text.startswith(prompt)
    assert whole.text == prompt + alone.text


def test_a_stop_word_or_its_beginning_is_sent(streaming: LocalTriton) -> None:
    """Stop words out of a known completion, from every place of it, and in every length up to seven characters."""
    known = ask(streaming, generate, **GREEDY).text
    places = range(len(known) - 1)
    words = [known[place : place + 1 + place % 7] for place in places]
    # A second word that begins like the first one and never comes holds text back, and must let it go.
    requests = [GREEDY | {"stop_words": [word, word[:1] + "\N{SNOWMAN}"]} for word in words]
    for start in range(0, len(requests), 24):
        chunk = requests[start : start + 24]
        jobs = [
            partial(both, streaming, STREAM_WIRES[index % 3], **request)
            for index, request in enumerate(chunk)
        ]  # fmt: skip
        for (whole, streamed), word in zip(at_once(jobs), words[start : start + 24], strict=True):
            assert whole.text == known[: known.index(word)]
            assert whole.finish_reason == "stop"
            assert word not in streamed.whole.text


def test_random_streams_are_not_their_texts(streaming: LocalTriton) -> None:
    randomness = random.Random(43)
    requests = [_random_request(randomness, seed) for seed in range(48)]
    for start in range(0, len(requests), 24):
        chunk = requests[start : start + 24]
        at_once([partial(both, streaming, STREAM_WIRES[index % 3], **one) for index, one in enumerate(chunk)])


def _random_request(randomness: random.Random, seed: int) -> dict[str, object]:
    start = randomness.randrange(len(reference_text()) - 200)
    return {
        "text_input": reference_text()[start : start + randomness.randrange(1, 200)],
        "max_tokens": randomness.randrange(1, 30),
        "temperature": randomness.choice([0.0, 0.7, 1.0, 2.0]),
        "top_p": randomness.choice([0.9, 1.0]),
        "top_k": randomness.choice([0, 20]),
        "repetition_penalty": randomness.choice([0.8, 1.0, 1.3]),
        "seed": seed,
        "stop_words": randomness.choice([[""], ["e"], ["\n", "the", ". "], [" of the ", "in", "x" * 40]]),
        "exclude_input_in_output": randomness.random() < 0.7,
    }
