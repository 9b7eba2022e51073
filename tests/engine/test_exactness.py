"""Promise 2: greedy output in FP32 is token-identical to `generate()` on the prompt alone, in any batch."""

import random

import pytest
from engine.engines import engine_of, with_tokens_as_text
from engine.exactness import LONGEST, Tally, compare, mix, pool
from engine.greedy import GreedyReference
from engine.prompts import random_prompt
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.model.loader import Checkpoint
from notes import Note


@pytest.fixture(scope="module")
def reference(fp32: Checkpoint) -> GreedyReference:
    return GreedyReference(fp32, LONGEST)


@pytest.mark.parametrize(("batches", "prompts"), [(20, 16), pytest.param(200, 60, marks=pytest.mark.long)])
def test_greedy_tokens_are_those_of_generate(
    fp32: Checkpoint, reference: GreedyReference, batches: int, prompts: int, note: Note
) -> None:
    randomness, tally = random.Random(200), Tally()
    given = pool(fp32.tokenizer, prompts, randomness)
    # Three slots: sequences wait, and are prefilled while others decode. A small budget: a batch is prefilled in parts.
    exposed = with_tokens_as_text(fp32)
    engines = [engine_of(exposed, 8), engine_of(exposed, 3), engine_of(exposed, 8, prefill_tokens="256")]
    for _ in range(batches):
        requests = mix(given, randomness.randint(1, 8), randomness)
        compare(randomness.choice(engines), requests, {1.0: reference}, tally)
    note(f"greedy FP32 against generate() alone: {tally}")
    assert tally.requests > 3.5 * batches
    assert tally.ties <= 1


def test_greedy_tokens_with_repetition_penalties_are_those_of_generate(
    fp32: Checkpoint, reference: GreedyReference, note: Note
) -> None:
    randomness, tally = random.Random(7), Tally()
    engine = engine_of(with_tokens_as_text(fp32), 5)
    prompts = pool(fp32.tokenizer, 12, randomness)
    references = {1.0: reference, **{penalty: GreedyReference(fp32, LONGEST, penalty) for penalty in (0.8, 1.3)}}
    for penalty in (0.8, 1.3):
        for _ in range(5):
            requests = mix(prompts, 2, randomness, penalty) + mix(prompts, 3, randomness, 1.0)
            compare(engine, requests, references, tally)
    note(f"the same with repetition penalties: {tally}")
    assert tally.requests == 50
    assert tally.ties <= 1


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129])
def test_greedy_tokens_are_those_of_generate_at_the_boundaries_of_attention_spans(
    fp32: Checkpoint, length: int
) -> None:
    reference, randomness = {1.0: GreedyReference(fp32, 6)}, random.Random(length)
    engine = engine_of(with_tokens_as_text(fp32), 2)
    for _ in range(12):
        prompt = random_prompt(fp32.tokenizer, range(length, length + 1), randomness)[1]
        compare(engine, [GenerationRequest(prompt="", prompt_tokens=prompt, max_tokens=6)], reference, Tally())


@pytest.mark.parametrize(("length", "max_tokens"), [(511, 1), (500, 12)])
def test_greedy_tokens_are_those_of_generate_at_the_end_of_the_cache(
    fp32: Checkpoint, reference: GreedyReference, length: int, max_tokens: int
) -> None:
    assert fp32.max_model_len == 512
    prompt = random_prompt(fp32.tokenizer, range(length, length + 1), random.Random(length))[1]
    longest = GenerationRequest(prompt="", prompt_tokens=prompt, max_tokens=max_tokens)
    short = GenerationRequest(prompt="", prompt_tokens=prompt[:9], max_tokens=12)
    compare(engine_of(with_tokens_as_text(fp32), 2), [short, longest, longest], {1.0: reference}, Tally())
