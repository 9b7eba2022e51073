"""Promise 2: greedy output in FP32 is token-identical to `generate()` on the prompt alone, whoever shares the batch."""

import random
from dataclasses import dataclass

import pytest
from llama_engine.checkpoint import Checkpoint
from llama_engine.engine import Engine
from llama_engine.requests import GenerationRequest
from llama_engine.text import TextCodec
from unit.engines import completions, engine_of, tokens_in, with_tokens_as_text
from unit.greedy import GreedyReference
from unit.notes import Note
from unit.prompts import random_prompt

LONGEST = 16


@dataclass
class _Tally:
    requests: int = 0
    tokens: int = 0
    ties: int = 0


def _compare(
    engine: Engine, requests: list[GenerationRequest], references: dict[float, GreedyReference], tally: _Tally
) -> None:
    """Compare every row with the reference of its repetition penalty."""
    for request, completion in zip(requests, completions(engine, requests), strict=True):
        reference = references[request.repetition_penalty]
        ours = tokens_in(completion.text)
        theirs = reference.tokens(request.prompt_tokens, request.max_tokens)
        tally.requests += 1
        tally.tokens += len(theirs)
        assert completion.num_input_tokens == len(request.prompt_tokens)
        assert completion.num_output_tokens == len(ours)
        assert completion.finish_reason == ("stop" if ours[-1] in engine.defaults.end_tokens else "length")
        if ours != theirs:
            assert reference.is_tie(request.prompt_tokens, ours, theirs), f"{request}\nours {ours}\ntheirs {theirs}"
            tally.ties += 1


def _pool(codec: TextCodec, size: int, randomness: random.Random) -> list[tuple[int, ...]]:
    """Distinct prompts: half of them short, so that prefill pads a lot; all lengths on both sides of a span bucket."""
    short = [random_prompt(codec, range(2, 24), randomness)[1] for _ in range(size // 2)]
    return short + [random_prompt(codec, range(1, 201), randomness)[1] for _ in range(size - len(short))]


def _mix(
    prompts: list[tuple[int, ...]], rows: int, randomness: random.Random, penalty: float = 1.0
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt="",
            prompt_tokens=randomness.choice(prompts),
            max_tokens=randomness.randint(1, LONGEST),
            repetition_penalty=penalty,
        )
        for _ in range(rows)
    ]


def test_greedy_tokens_are_not_those_of_generate(fp32: Checkpoint, note: Note) -> None:
    randomness, tally = random.Random(200), _Tally()
    reference = {1.0: GreedyReference(fp32, LONGEST)}
    prompts = _pool(fp32.codec, 60, randomness)
    # Three slots: rows wait, and are prefilled while others decode. Small prefills: a batch enters in several groups.
    exposed = with_tokens_as_text(fp32)
    engines = [engine_of(exposed, 8), engine_of(exposed, 3), engine_of(exposed, 8, prefill_tokens="256")]
    for _ in range(200):
        _compare(randomness.choice(engines), _mix(prompts, randomness.randint(1, 8), randomness), reference, tally)
    note(f"greedy FP32 against generate() alone: {tally}")
    assert tally.requests > 700
    assert tally.ties <= 1


def test_greedy_tokens_with_a_repetition_penalty_are_not_those_of_generate(fp32: Checkpoint, note: Note) -> None:
    randomness, tally = random.Random(7), _Tally()
    exposed = with_tokens_as_text(fp32)
    engine = engine_of(exposed, 5)
    prompts = _pool(fp32.codec, 12, randomness)
    references = {penalty: GreedyReference(fp32, LONGEST, penalty) for penalty in (0.8, 1.0, 1.3)}
    for penalty in (0.8, 1.3):
        for _ in range(5):
            requests = _mix(prompts, 2, randomness, penalty) + _mix(prompts, 3, randomness, 1.0)
            _compare(engine, requests, references, tally)
    note(f"the same with repetition penalties: {tally}")
    assert tally.requests == 50
    assert tally.ties <= 1


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129])
def test_tokens_change_where_attention_moves_to_the_next_span(fp32: Checkpoint, length: int) -> None:
    reference, tally, randomness = {1.0: GreedyReference(fp32, 6)}, _Tally(), random.Random(length)
    prompts = [random_prompt(fp32.codec, range(length, length + 1), randomness)[1] for _ in range(12)]
    requests = [GenerationRequest(prompt="", prompt_tokens=prompt, max_tokens=6) for prompt in prompts]
    engine = engine_of(with_tokens_as_text(fp32), 2)
    for request in requests:
        _compare(engine, [request], reference, tally)


@pytest.mark.parametrize(("length", "max_tokens"), [(511, 1), (500, 12)])
def test_tokens_change_at_the_end_of_the_cache(fp32: Checkpoint, length: int, max_tokens: int) -> None:
    reference, tally = {1.0: GreedyReference(fp32, 12)}, _Tally()
    assert fp32.max_model_len == 512
    prompt = random_prompt(fp32.codec, range(length, length + 1), random.Random(length))[1]
    longest = GenerationRequest(prompt="", prompt_tokens=prompt, max_tokens=max_tokens)
    short = GenerationRequest(prompt="", prompt_tokens=prompt[:9], max_tokens=12)
    engine = engine_of(with_tokens_as_text(fp32), 2)
    _compare(engine, [short, longest, longest], reference, tally)
