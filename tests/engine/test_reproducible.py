"""Promise 3: same seed, same request, same text, alone and among others, in FP32 and in INT8."""

import random
from dataclasses import replace

import numpy as np
import pytest
from engine.engines import completions, engine_of
from engine.prompts import random_prompt
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.model.loader import Checkpoint


def _random_requests(checkpoint: Checkpoint, count: int, randomness: random.Random) -> list[GenerationRequest]:
    requests = []
    for _ in range(count):
        prompt, tokens = random_prompt(checkpoint.tokenizer, range(1, 120), randomness)
        requests.append(
            GenerationRequest(
                prompt=prompt,
                prompt_tokens=tokens,
                max_tokens=randomness.randint(4, 20),
                min_tokens=randomness.choice((0, 4)),
                temperature=float(np.float32(randomness.choice((0.0, 0.5, 0.9, 1.5)))),
                top_k=randomness.choice((0, 5, 50)),
                top_p=float(np.float32(randomness.choice((1.0, 0.9, 0.5)))),
                repetition_penalty=randomness.choice((1.0, 1.0, 1.25)),
                frequency_penalty=randomness.choice((0.0, 0.5)),
                presence_penalty=randomness.choice((0.0, -0.5)),
                seed=randomness.getrandbits(64),
                stop_words=randomness.choice(((), (b".", b"\n"))),
                bad_words=randomness.choice(((), (b" the", b"e"))),
            )
        )
    return requests


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_text_depends_on_who_shares_the_batch(precision: str, request: pytest.FixtureRequest) -> None:
    checkpoint: Checkpoint = request.getfixturevalue(precision)
    randomness = random.Random(33)
    wide, narrow = engine_of(checkpoint, 8), engine_of(checkpoint, 3)
    for _ in range(3):
        requests = _random_requests(checkpoint, 8, randomness)
        alone = [completions(wide, [single])[0] for single in requests]
        assert completions(wide, requests) == alone
        assert completions(narrow, requests) == alone
        assert completions(wide, requests[::-1]) == alone[::-1]


def test_the_seed_has_no_effect(fp32: Checkpoint) -> None:
    (first,) = _random_requests(fp32, 1, random.Random(4))
    first = replace(first, temperature=1.0, top_k=0, top_p=1.0, max_tokens=16, min_tokens=16, stop_words=())
    texts = {c.text for c in completions(engine_of(fp32), [replace(first, seed=seed) for seed in range(8)])}
    assert len(texts) == 8
