"""Promise 2: greedy output in FP32 is token-identical to `generate()` on the prompt alone, whoever shares the batch."""

import random

import pytest
from engine.engines import engine_of, with_tokens_as_text
from engine.exactness import LONGEST, Tally, compare, mix, pool
from engine.greedy import GreedyReference
from engine.prompts import random_prompt
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.model.loader import Checkpoint
from notes import Note


def test_greedy_tokens_are_not_those_of_generate(fp32: Checkpoint, note: Note) -> None:
    randomness, tally = random.Random(200), Tally()
    reference = {1.0: GreedyReference(fp32, LONGEST)}
    prompts = pool(fp32.tokenizer, 60, randomness)
    # Three slots: rows wait, and are prefilled while others decode. Small prefills: a batch enters in several groups.
    exposed = with_tokens_as_text(fp32)
    engines = [engine_of(exposed, 8), engine_of(exposed, 3), engine_of(exposed, 8, prefill_tokens="256")]
    for _ in range(200):
        compare(randomness.choice(engines), mix(prompts, randomness.randint(1, 8), randomness), reference, tally)
    note(f"greedy FP32 against generate() alone: {tally}")
    assert tally.requests > 700
    assert tally.ties <= 1


def test_greedy_tokens_with_a_repetition_penalty_are_not_those_of_generate(fp32: Checkpoint, note: Note) -> None:
    randomness, tally = random.Random(7), Tally()
    exposed = with_tokens_as_text(fp32)
    engine = engine_of(exposed, 5)
    prompts = pool(fp32.tokenizer, 12, randomness)
    references = {penalty: GreedyReference(fp32, LONGEST, penalty) for penalty in (0.8, 1.0, 1.3)}
    for penalty in (0.8, 1.3):
        for _ in range(5):
            requests = mix(prompts, 2, randomness, penalty) + mix(prompts, 3, randomness, 1.0)
            compare(engine, requests, references, tally)
    note(f"the same with repetition penalties: {tally}")
    assert tally.requests == 50
    assert tally.ties <= 1


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129])
def test_tokens_change_where_attention_moves_to_the_next_span(fp32: Checkpoint, length: int) -> None:
    reference, tally, randomness = {1.0: GreedyReference(fp32, 6)}, Tally(), random.Random(length)
    prompts = [random_prompt(fp32.tokenizer, range(length, length + 1), randomness)[1] for _ in range(12)]
    requests = [GenerationRequest(prompt="", prompt_tokens=prompt, max_tokens=6) for prompt in prompts]
    engine = engine_of(with_tokens_as_text(fp32), 2)
    for request in requests:
        compare(engine, [request], reference, tally)


@pytest.mark.parametrize(("length", "max_tokens"), [(511, 1), (500, 12)])
def test_tokens_change_at_the_end_of_the_cache(fp32: Checkpoint, length: int, max_tokens: int) -> None:
    reference, tally = {1.0: GreedyReference(fp32, 12)}, Tally()
    assert fp32.max_model_len == 512
    prompt = random_prompt(fp32.tokenizer, range(length, length + 1), random.Random(length))[1]
    longest = GenerationRequest(prompt="", prompt_tokens=prompt, max_tokens=max_tokens)
    short = GenerationRequest(prompt="", prompt_tokens=prompt[:9], max_tokens=12)
    engine = engine_of(with_tokens_as_text(fp32), 2)
    compare(engine, [short, longest, longest], reference, tally)
