"""Promise 3: same seed, same request, same text, alone and among others, in FP32 and in INT8."""

import random
from dataclasses import replace

import pytest
from engine.engines import completions, engine_of
from engine.requests import request_of
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.model.loader import Checkpoint


def _random_request(checkpoint: Checkpoint, randomness: random.Random) -> GenerationRequest:
    max_tokens = randomness.randint(4, 20)
    return replace(
        request_of(checkpoint, randomness.getrandbits(64), range(1, 120), max_tokens),
        min_tokens=randomness.choice((0, 4)),
        temperature=randomness.choice((0.0, 0.5, 0.875, 1.5)),
        top_k=randomness.choice((0, 5, 50)),
        top_p=randomness.choice((1.0, 0.875, 0.5)),
        repetition_penalty=randomness.choice((1.0, 1.0, 1.25)),
        frequency_penalty=randomness.choice((0.0, 0.5)),
        presence_penalty=randomness.choice((0.0, -0.5)),
        stop_words=randomness.choice(((), (b".", b"\n"))),
        bad_words=randomness.choice(((), (b" the", b"e"))),
    )


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_text_is_the_same_alone_and_in_any_batch(precision: str, request: pytest.FixtureRequest) -> None:
    checkpoint: Checkpoint = request.getfixturevalue(precision)
    randomness = random.Random(33)
    wide, narrow = engine_of(checkpoint, 8), engine_of(checkpoint, 3)
    for _ in range(3):
        requests = [_random_request(checkpoint, randomness) for _ in range(8)]
        alone = [completions(wide, [single])[0] for single in requests]
        assert completions(wide, requests) == alone
        assert completions(narrow, requests) == alone
        assert completions(wide, requests[::-1]) == alone[::-1]


def test_different_seeds_give_different_texts(fp32: Checkpoint) -> None:
    request = replace(request_of(fp32, 4, max_tokens=16), temperature=1.0, top_k=0)
    texts = {one.text for one in completions(engine_of(fp32), [replace(request, seed=seed) for seed in range(8)])}
    assert len(texts) == 8
