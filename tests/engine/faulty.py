"""Requests that show a token counted twice, and what a failure of one of them may cost the others."""

import random
from collections.abc import Sequence

from engine.prompts import random_prompt
from engine.stepping import Run
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.errors import GenerationError
from llama_engine.model.loader import Checkpoint
from llama_engine.sequence import Result

FAILED = "decoding failed; the server's log has the reason"


def penalized_request(checkpoint: Checkpoint, index: int, lengths: range = range(3, 60)) -> GenerationRequest:
    """Sampled, with every penalty: a token that is counted twice shows in the ones after it."""
    return GenerationRequest(
        prompt="", prompt_tokens=random_prompt(checkpoint.tokenizer, lengths, random.Random(index))[1],
        max_tokens=8, min_tokens=8, temperature=0.9, top_k=40, seed=index, frequency_penalty=2.0,
        presence_penalty=0.5, repetition_penalty=1.3,
    )  # fmt: skip


def penalized(checkpoint: Checkpoint, count: int) -> list[GenerationRequest]:
    return [penalized_request(checkpoint, index) for index in range(count)]


def only_fails(run: Run, place: int, expected: Sequence[Result], message: str = FAILED) -> None:
    assert isinstance(run.results[place], GenerationError)
    assert str(run.results[place]) == message
    for index, outcome in enumerate(run.results):
        assert index == place or outcome == expected[index]
