"""Prompts read in chunks: the tokens are those of generate() on the prompt alone, whatever the chunk and the slots."""

import random

import pytest
from engine.engines import engine_of, tokens_in, with_tokens_as_text
from engine.forward_passes import ForwardPass, watching
from engine.greedy import GreedyReference
from engine.prompts import random_prompt
from engine.stepping import run_requests
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.model.loader import Checkpoint
from llama_engine.sequence import Completion

LONGEST = 10


@pytest.fixture(scope="module")
def reference(fp32: Checkpoint) -> GreedyReference:
    return GreedyReference(fp32, LONGEST)


def _prompts(checkpoint: Checkpoint, longest: int) -> list[tuple[int, ...]]:
    """The lengths on both sides of the chunks' borders, and some at random."""
    randomness = random.Random(3)
    lengths = [length for length in (1, 7, 8, 16, 17, 32, 49, 64, 65, 100, 128, 129) if length <= longest]
    lengths += [randomness.randint(2, longest) for _ in range(4)]
    randomness.shuffle(lengths)
    return [random_prompt(checkpoint.tokenizer, range(length, length + 1), randomness)[1] for length in lengths]


@pytest.mark.parametrize(
    ("prefill_tokens", "slots", "longest"),
    [(1, 1, 17), (1, 3, 17), (7, 1, 65), (7, 4, 65), (16, 2, 129), (16, 8, 129), (64, 1, 129), (64, 3, 129)],
)
def test_a_prompt_read_in_chunks_gives_other_tokens(
    fp32: Checkpoint, reference: GreedyReference, prefill_tokens: int, slots: int, longest: int
) -> None:
    randomness = random.Random(prefill_tokens)
    requests = [
        GenerationRequest(prompt="", prompt_tokens=prompt, max_tokens=randomness.randint(1, LONGEST))
        for prompt in _prompts(fp32, longest)
    ]
    engine = engine_of(with_tokens_as_text(fp32), slots, prefill_tokens=str(prefill_tokens))
    run = run_requests(engine, requests)
    for request, outcome in zip(requests, run.results, strict=True):
        assert isinstance(outcome, Completion)
        ours, theirs = tokens_in(outcome.text), reference.tokens(request.prompt_tokens, request.max_tokens)
        assert ours == theirs or reference.is_tie(request.prompt_tokens, ours, theirs)
    assert max(step.prefill_tokens for step in run.steps) <= prefill_tokens
    assert sum(step.prefill_tokens for step in run.steps) >= sum(len(request.prompt_tokens) for request in requests)


def test_the_longest_prompt_changes_in_chunks(fp32: Checkpoint) -> None:
    prompt = random_prompt(fp32.tokenizer, range(510, 511), random.Random(8))[1]
    request = GenerationRequest(prompt="", prompt_tokens=prompt, max_tokens=2)
    (expected,) = run_requests(engine_of(fp32, 1, prefill_tokens="512"), [request]).results
    assert run_requests(engine_of(fp32, 2, prefill_tokens="100"), [request]).results == [expected]


def test_a_chunk_is_read_twice_or_out_of_place(fp32: Checkpoint) -> None:
    """The passes over one prompt of 100 tokens, and that two short ones behind it are read together."""
    prompts = [random_prompt(fp32.tokenizer, range(size, size + 1), random.Random(size))[1] for size in (100, 6, 8)]
    requests = [GenerationRequest(prompt="", prompt_tokens=one, max_tokens=3, min_tokens=3) for one in prompts]
    seen: list[tuple[int, int, int]] = []

    def note(one: ForwardPass) -> None:
        if one.width > 1:
            seen.append((one.tokens.shape[0], int(one.positions[0, 0]), one.width))

    with watching(fp32, note):
        run = run_requests(engine_of(fp32, 3, prefill_tokens="32"), requests)
    assert seen == [(1, 0, 32), (1, 32, 32), (1, 64, 32), (1, 96, 4), (2, 0, 8)]
    assert [step.prefill_tokens for step in run.steps[:5]] == [32, 32, 32, 4, 16]
