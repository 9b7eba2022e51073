"""Requests whose text shows every fault: a token counted twice, or a neighbour's parameters, changes what follows."""

import random

from engine.prompts import random_prompt
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.model.loader import Checkpoint


def request_of(
    checkpoint: Checkpoint, seed: int, size: int | range = range(3, 60), max_tokens: int = 8
) -> GenerationRequest:
    """Return a request of `size` prompt tokens that generates exactly `max_tokens`, sampled with every penalty."""
    sizes = size if isinstance(size, range) else range(size, size + 1)
    return GenerationRequest(
        prompt="", prompt_tokens=random_prompt(checkpoint.tokenizer, sizes, random.Random(seed))[1],
        max_tokens=max_tokens, min_tokens=max_tokens, temperature=0.9, top_k=40, seed=seed, frequency_penalty=2.0,
        presence_penalty=0.5, repetition_penalty=1.3,
    )  # fmt: skip


def requests_of(
    checkpoint: Checkpoint, count: int, size: int | range = range(3, 60), max_tokens: int = 8
) -> list[GenerationRequest]:
    return [request_of(checkpoint, seed, size, max_tokens) for seed in range(count)]
