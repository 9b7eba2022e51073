"""Chunked prefill: for every budget and number of slots, the tokens are those of generate() on the prompt alone."""

import random

import pytest
from engine.engines import engine_of, tokens_in, with_tokens_as_text
from engine.forward_passes import ForwardPass, watching
from engine.greedy import GreedyReference
from engine.prompts import random_prompt
from engine.requests import request_of
from engine.stepping import run_requests
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.model.loader import Checkpoint
from llama_engine.sequence import Completion

LONGEST = 10


@pytest.fixture(scope="module")
def reference(fp32: Checkpoint) -> GreedyReference:
    return GreedyReference(fp32, LONGEST)


def _greedy_requests(checkpoint: Checkpoint, longest: int, randomness: random.Random) -> list[GenerationRequest]:
    """Prompts of the lengths on both sides of the chunks' boundaries, and of random ones."""
    lengths = [length for length in (1, 7, 8, 16, 17, 32, 49, 64, 65, 100, 128, 129) if length <= longest]
    lengths += [randomness.randint(2, longest) for _ in range(4)]
    randomness.shuffle(lengths)
    prompts = [random_prompt(checkpoint.tokenizer, range(length, length + 1), randomness)[1] for length in lengths]
    return [
        GenerationRequest(prompt="", prompt_tokens=prompt, max_tokens=randomness.randint(1, LONGEST))
        for prompt in prompts
    ]


@pytest.mark.parametrize(
    ("prefill_tokens", "slots", "longest"),
    [(1, 1, 17), (1, 3, 17), (7, 1, 65), (7, 4, 65), (16, 2, 129), (16, 8, 129), (64, 1, 129), (64, 3, 129)],
)
def test_chunks_give_the_tokens_of_generate_within_the_budget(
    fp32: Checkpoint, reference: GreedyReference, prefill_tokens: int, slots: int, longest: int
) -> None:
    requests = _greedy_requests(fp32, longest, random.Random(3))
    run = run_requests(engine_of(with_tokens_as_text(fp32), slots, prefill_tokens=str(prefill_tokens)), requests)
    for request, result in zip(requests, run.results, strict=True):
        assert isinstance(result, Completion)
        ours, theirs = tokens_in(result.text), reference.tokens(request.prompt_tokens, request.max_tokens)
        assert ours == theirs or reference.is_tie(request.prompt_tokens, ours, theirs)
    assert max(step.prefill_tokens for step in run.steps) <= prefill_tokens
    assert sum(step.prefill_tokens for step in run.steps) >= sum(len(request.prompt_tokens) for request in requests)


def test_the_longest_prompt_in_chunks_gives_the_same_tokens(fp32: Checkpoint) -> None:
    request = request_of(fp32, 8, 510, 2)
    whole, chunked = (
        run_requests(engine_of(fp32, slots, prefill_tokens=budget), [request]).results
        for slots, budget in ((1, "512"), (2, "100"))
    )
    assert chunked == whole


def test_each_chunk_is_computed_once_and_in_order_and_short_prompts_behind_it_together(fp32: Checkpoint) -> None:
    seen: list[tuple[int, int, int]] = []

    def record(one: ForwardPass) -> None:
        if one.width > 1:
            seen.append((one.tokens.shape[0], int(one.positions[0, 0]), one.width))

    with watching(fp32, record):
        requests = [request_of(fp32, size, size, 3) for size in (100, 6, 8)]
        run = run_requests(engine_of(fp32, 3, prefill_tokens="32"), requests)
    assert seen == [(1, 0, 32), (1, 32, 32), (1, 64, 32), (1, 96, 4), (2, 0, 8)]
    assert [step.prefill_tokens for step in run.steps[:5]] == [32, 32, 32, 4, 16]
