"""Greedy output in FP32 is token-identical to `generate()` on the prompt alone, in any batch and chunks."""

import random
from dataclasses import replace

import pytest
from engine.engines import attention_by_sequence, engine_of, run, with_tokens_as_text
from engine.forward_passes import ForwardPass, watching
from engine.greedy import LONGEST, GreedyReference, Tally, compare, mix, pool
from engine.guesses import guess_at_random
from engine.logits import oracle
from engine.prompts import random_prompt, request_of
from llama_engine.engine.sequence import Sequence
from llama_engine.model.loader import LoadedModel
from llama_engine.request.generation_request import GenerationRequest


@pytest.fixture(scope="module")
def short_reference(fp32: LoadedModel) -> GreedyReference:
    return GreedyReference(oracle(fp32), 10)


@pytest.fixture(scope="module")
def exposed(fp32: LoadedModel) -> LoadedModel:
    return with_tokens_as_text(fp32)


def test_greedy_tokens_are_those_of_generate(exposed: LoadedModel) -> None:
    batches, randomness, tally = 15, random.Random(200), Tally()
    prompt_pool = pool(exposed.tokenizer, 6, randomness)
    references = {penalty: GreedyReference(oracle(exposed), LONGEST, penalty) for penalty in (1.0, 0.8, 1.3)}
    by_row = replace(exposed, attention=attention_by_sequence)
    # Three slots: sequences wait, and are prefilled while others decode. A small budget: a batch is prefilled in parts.
    engines = [
        engine_of(exposed, 8),
        engine_of(by_row, 3),
        engine_of(by_row, 8, prefill_tokens="256"),
        # With so few pages that prefixes are evicted.
        engine_of(exposed, 8, kv_cache_tokens="512"),
        engine_of(exposed, 16, speculation="on"),
    ]

    def foretell(sequence: Sequence) -> list[int]:
        request = sequence.request
        return references[request.repetition_penalty].tokens(request.prompt_tokens, request.max_tokens)

    drafts = guess_at_random(engines[-1], foretell, randomness)
    for batch in range(batches):
        requests = mix(prompt_pool, randomness.randint(1, 6), randomness)
        requests += mix(prompt_pool, randomness.randint(0, 3), randomness, randomness.choice((0.8, 1.3)))
        compare(engines[batch % len(engines)], requests, references, tally)
    assert tally.requests > 3.5 * batches
    assert tally.ties == 0
    assert tally.evicted_pages > 0
    assert sum(draft.accepted for draft in drafts) > 10


def test_preempted_and_resumed_sequences_have_the_tokens_of_generate(exposed: LoadedModel) -> None:
    reference, tally = GreedyReference(oracle(exposed), 36), Tally()
    requests = list[GenerationRequest]()
    # Eight pages, of which a sequence takes one for its prompt, and two or three for its output.
    engine = engine_of(replace(exposed, max_model_len=128), 6, kv_cache_tokens="128")
    for resumed in (0, 1, 0, 0, 4, 0):
        prompt = random_prompt(exposed.tokenizer, range(11, 16), random.Random(len(requests)))[1]
        tokens = reference.tokens(prompt, resumed)
        requests.append(GenerationRequest("", prompt, max_tokens=reference.longest, resume_ids=tuple(tokens)))
    compare(engine, requests, {1.0: reference}, tally)
    assert tally.preempted > 1


LENGTHS = (1, 7, 8, 16, 17, 32, 49, 64, 65, 100, 128, 129, 502, 511)
"""On both sides of the boundaries of chunks and of attention spans, and at the end of the cache."""


@pytest.mark.parametrize(
    ("slots", "prefill_tokens", "longest", "by_row"),
    [(2, 512, 511, False), (2, 100, 502, True), (3, 1, 17, True), (4, 7, 65, False), (8, 16, 129, True)],
)
def test_greedy_tokens_of_prompts_of_these_lengths_are_those_of_generate(
    exposed: LoadedModel, short_reference: GreedyReference, slots: int, prefill_tokens: int, longest: int, by_row: bool
) -> None:
    assert exposed.max_model_len == 512
    requests = [
        GenerationRequest(
            prompt="",
            prompt_tokens=random_prompt(exposed.tokenizer, range(length, length + 1), random.Random(length))[1],
            max_tokens=min(short_reference.longest, 512 - length),
        )
        for length in LENGTHS
        if length <= longest
    ]
    random.Random(3).shuffle(requests)
    # As on a GPU a pass attends in one call.
    checkpoint = replace(exposed, attention=attention_by_sequence) if by_row else exposed
    engine = engine_of(checkpoint, slots, prefill_tokens=str(prefill_tokens))
    compare(engine, requests, {1.0: short_reference}, Tally())


def test_chunks_of_a_prompt_are_computed_once(fp32: LoadedModel) -> None:
    seen: list[tuple[int, int, int]] = []

    def record(forward: ForwardPass) -> None:
        if not forward.decodes:
            seen.append((len(forward.chunks), forward.chunks[0].start, forward.tokens))

    engine = engine_of(fp32, 3, prefill_tokens="32")
    with watching(record):
        steps = run(engine, [engine.builder.build(request_of(fp32, size, size, 3)) for size in (100, 6, 8)]).steps
    assert seen == [(1, 0, 32), (1, 32, 32), (1, 64, 32), (1, 96, 4), (2, 0, 14)]
    assert [step.prefill_tokens for step in steps[:5]] == [32, 32, 32, 4, 14]
