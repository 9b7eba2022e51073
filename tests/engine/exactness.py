"""Compare an engine's greedy tokens with those of `generate()` on each prompt alone: how promise 2 is tested."""

import random
from dataclasses import dataclass

from engine.engines import completions, tokens_in
from engine.greedy import GreedyReference
from engine.prompts import random_prompt
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine
from llama_engine.text.tokenizer import Tokenizer

LONGEST = 16
"""Maximum tokens of a completion."""


@dataclass
class Tally:
    """What was compared. ties: requests whose tokens differ from generate()'s, with promise 2's excuse."""

    requests: int = 0
    tokens: int = 0
    ties: int = 0


def compare(
    engine: Engine, requests: list[GenerationRequest], references: dict[float, GreedyReference], tally: Tally
) -> None:
    """Compare every completion with the reference of its repetition penalty; an AssertionError shows both."""
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


def pool(tokenizer: Tokenizer, size: int, randomness: random.Random) -> list[tuple[int, ...]]:
    """Random prompts, half of them short, so that prefill pads a lot; lengths on both sides of a span bucket."""
    short = [random_prompt(tokenizer, range(2, 24), randomness)[1] for _ in range(size // 2)]
    return short + [random_prompt(tokenizer, range(1, 201), randomness)[1] for _ in range(size - len(short))]


def mix(
    prompts: list[tuple[int, ...]], rows: int, randomness: random.Random, penalty: float = 1.0
) -> list[GenerationRequest]:
    """Requests of one batch, with prompts from a pool."""
    return [
        GenerationRequest(
            prompt="",
            prompt_tokens=randomness.choice(prompts),
            max_tokens=randomness.randint(1, LONGEST),
            repetition_penalty=penalty,
        )
        for _ in range(rows)
    ]
