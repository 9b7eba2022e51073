"""Promise 2: greedy output in FP32 is token-identical to `generate()` on the prompt alone, in any batch and chunks."""

import random
from dataclasses import replace

import pytest
from engine.engines import engine_of, run, with_tokens_as_text
from engine.forward_passes import ForwardPass, watching
from engine.greedy import LONGEST, GreedyReference, Tally, compare, mix, pool
from engine.prompts import random_prompt, request_of
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.kernels import reference as kernels
from llama_engine.kernels.selection import Kernels
from llama_engine.model.loader import Checkpoint
from notes import Note


@pytest.fixture(scope="module")
def reference(fp32: Checkpoint) -> GreedyReference:
    return GreedyReference(fp32, LONGEST)


@pytest.fixture(scope="module")
def exposed(fp32: Checkpoint) -> Checkpoint:
    return with_tokens_as_text(fp32)


def _requests(exposed: Checkpoint, lengths: list[int], max_tokens: int, seed: int) -> list[GenerationRequest]:
    randomness = random.Random(seed)
    prompts = [random_prompt(exposed.tokenizer, range(length, length + 1), randomness)[1] for length in lengths]
    return [GenerationRequest(prompt="", prompt_tokens=prompt, max_tokens=max_tokens) for prompt in prompts]


@pytest.mark.parametrize(("batches", "prompts"), [(20, 16), pytest.param(200, 60, marks=pytest.mark.long)])
def test_greedy_tokens_are_those_of_generate_with_repetition_penalties_beside_them(
    exposed: Checkpoint, reference: GreedyReference, batches: int, prompts: int, note: Note
) -> None:
    randomness, tally = random.Random(200), Tally()
    given = pool(exposed.tokenizer, prompts, randomness)
    references = {1.0: reference, **{penalty: GreedyReference(exposed, LONGEST, penalty) for penalty in (0.8, 1.3)}}
    by_row = replace(exposed, kernels=Kernels(attention=kernels.decode_attention))
    # Three slots: sequences wait, and are prefilled while others decode. A small budget: a batch is prefilled in parts.
    engines = [engine_of(exposed, 8), engine_of(by_row, 3), engine_of(by_row, 8, prefill_tokens="256")]
    for _ in range(batches):
        requests = mix(given, randomness.randint(1, 6), randomness)
        requests += mix(given, randomness.randint(0, 3), randomness, randomness.choice((0.8, 1.3)))
        compare(randomness.choice(engines), requests, references, tally)
    note(f"greedy FP32 against generate() alone: {tally}")
    assert tally.requests > 3.5 * batches
    assert tally.ties <= 1


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129])
def test_greedy_tokens_are_those_of_generate_at_the_boundaries_of_attention_spans(
    exposed: Checkpoint, length: int
) -> None:
    references, engine = {1.0: GreedyReference(exposed, 6)}, engine_of(exposed, 2)
    for request in _requests(exposed, [length] * 12, 6, length):
        compare(engine, [request], references, Tally())


@pytest.mark.parametrize(("length", "max_tokens"), [(511, 1), (500, 12)])
@pytest.mark.parametrize("prefill_tokens", ["512", "100"])
def test_greedy_tokens_are_those_of_generate_at_the_end_of_the_cache(
    exposed: Checkpoint, reference: GreedyReference, length: int, max_tokens: int, prefill_tokens: str
) -> None:
    assert exposed.max_model_len == 512
    (longest,) = _requests(exposed, [length], max_tokens, length)
    short = GenerationRequest(prompt="", prompt_tokens=longest.prompt_tokens[:9], max_tokens=12)
    engine = engine_of(exposed, 2, prefill_tokens=prefill_tokens)
    compare(engine, [short, longest, longest], {1.0: reference}, Tally())


@pytest.mark.parametrize(
    ("prefill_tokens", "slots", "longest"),
    [(1, 1, 17), (1, 3, 17), (7, 1, 65), (7, 4, 65), (16, 2, 129), (16, 8, 129), (64, 1, 129), (64, 3, 129)],
)
def test_greedy_tokens_of_prompts_in_chunks_are_those_of_generate(
    exposed: Checkpoint, reference: GreedyReference, prefill_tokens: int, slots: int, longest: int
) -> None:
    """Prompts of the lengths on both sides of the chunks' boundaries, and of random ones."""
    randomness = random.Random(3)
    lengths = [length for length in (1, 7, 8, 16, 17, 32, 49, 64, 65, 100, 128, 129) if length <= longest]
    lengths += [randomness.randint(2, longest) for _ in range(4)]
    randomness.shuffle(lengths)
    requests = _requests(exposed, lengths, 10, 3)
    compare(engine_of(exposed, slots, prefill_tokens=str(prefill_tokens)), requests, {1.0: reference}, Tally())


def test_each_chunk_is_computed_once_and_in_order_and_short_prompts_behind_it_together(fp32: Checkpoint) -> None:
    seen: list[tuple[int, int, int]] = []

    def record(one: ForwardPass) -> None:
        if one.width > 1:
            seen.append((one.tokens.shape[0], int(one.positions[0, 0]), one.width))

    engine = engine_of(fp32, 3, prefill_tokens="32")
    with watching(fp32, record):
        steps = run(engine, [engine.sequence(request_of(fp32, size, size, 3)) for size in (100, 6, 8)]).steps
    assert seen == [(1, 0, 32), (1, 32, 32), (1, 64, 32), (1, 96, 4), (2, 0, 8)]
    assert [step.prefill_tokens for step in steps[:5]] == [32, 32, 32, 4, 16]
