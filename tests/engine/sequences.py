"""Sequences without an engine, in a state of the test's choice."""

from llama_engine.api.request_parser import GenerationRequest
from llama_engine.sequence import Result, Sequence, Status
from llama_engine.text.stop_checker import StopChecker


def finished_sequence(
    result: Result,
    prompt: str = "",
    tokens: int = 0,
    admitted_at: float = 12.0,
    first_token_at: float = 15.0,
    finished_at: float = 20.0,
) -> Sequence:
    """A finished sequence of three prompt tokens that arrived at 10.0. tokens: output tokens."""
    stop_checker = StopChecker(min_tokens=0, max_tokens=9, stop_words=[], end_tokens=[])
    for token in range(tokens):
        stop_checker.add(token, b"x")
    return Sequence(
        GenerationRequest(prompt=prompt, prompt_tokens=(1, 2, 3), max_tokens=9), stop_checker,
        status=Status.FINISHED, result=result, arrived_at=10.0, admitted_at=admitted_at,
        first_token_at=first_token_at, finished_at=finished_at,
    )  # fmt: skip
