"""The load: requests to the OpenAI endpoint, of both paths, streamed and not, with every kind of parameters.

A request's number alone determines it. 132 consecutive ones have every feature with every sampling on both paths,
streamed and not: the periods 11, 3 and 4 have no common divisor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perf.workload import prompts

PROMPT_TOKENS = 48
MIN_OUTPUT, MAX_OUTPUT = 80, 300
"""Bounds of max_tokens; with the prompt and its template a request fits 512 tokens."""
_DIFFERENT_PROMPTS = 64

Fields = Mapping[str, object]

_SCHEMA = {
    "type": "object",
    "properties": {
        "kinds": {"type": "array", "items": {"enum": ["list", "dict", "tuple"]}, "minItems": 12, "maxItems": 30},
        "size": {"type": "integer", "minimum": 1, "maximum": 999},
    },
    "required": ["kinds", "size"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "make", "parameters": _SCHEMA}}

SAMPLINGS: tuple[Fields, ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 1.0},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "min_p": 0.01},
)
"""The last two get a seed: without one a request is another one each time."""

_COMMON: tuple[Fields, ...] = (
    {"ignore_eos": True},
    {"n": 2, "ignore_eos": True},
    {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.2, "min_tokens": 60},
    {"stop": ["returns", "object "], "min_tokens": 40},
    {"guided_regex": "([a-z]{2,9} ){20,40}end"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}},
    {"bad_words": ["the", " is"], "logit_bias": {"300": 2, "301": -5}, "min_tokens": 60},
    {"n": 3, "seed": 11, "max_tokens": 60},
)
FEATURES: Mapping[str, tuple[Fields, ...]] = {
    "/v1/chat/completions": (
        *_COMMON,
        {"logprobs": True, "top_logprobs": 3, "return_token_ids": True, "ignore_eos": True},
        # The definition of a function takes half of the context.
        {"tools": [_TOOL], "tool_choice": "required", "parallel_tool_calls": False, "truncate_max_tokens": True},
        {"tools": [_TOOL], "truncate_max_tokens": True},
    ),
    "/v1/completions": (
        *_COMMON,
        {"logprobs": 3, "return_token_ids": True, "ignore_eos": True},
        {"guided_choice": ["a list of the names of the attributes of an object", "a dictionary of all of them"]},
        {"echo": True, "stop": "\n"},
    ),
}
"""Fields by path, the rarer the later."""


@dataclass(frozen=True)
class Request:
    """A request. path: of the URL. body: its JSON object."""

    path: str
    body: Fields

    @property
    def streamed(self) -> bool:
        """Whether its answer comes as events."""
        return bool(self.body.get("stream"))


def mixed(model: str, checkpoint: Path, count: int) -> list[Request]:
    """Return the first `count` requests; model: the served name. Raises ValueError if the text has too few prompts."""
    texts = prompts(checkpoint, min(count, _DIFFERENT_PROMPTS), PROMPT_TOKENS)
    return [_request(number, texts[number % len(texts)], model) for number in range(count)]


def _request(number: int, text: str, model: str) -> Request:
    path = tuple(FEATURES)[number // 2 % 2]
    features = FEATURES[path]
    body: dict[str, object] = {
        "model": model,
        "max_tokens": MIN_OUTPUT + 37 * number % (MAX_OUTPUT - MIN_OUTPUT + 1),
        "seed": number,
        **SAMPLINGS[number % len(SAMPLINGS)],
        **features[number % len(features)],
    }
    if path == "/v1/completions":
        body["prompt"] = [text, text[:40]] if number % 5 == 0 else text
    else:
        body["messages"] = [{"role": "user", "content": text}]
    if number % 2 == 0:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Request(path, body)
