"""The load: chats and completions for the OpenAI endpoint, streamed and not, with every kind of parameters.

A request's protocol and number alone determine it. 66 consecutive ones have every feature with every sampling, streamed
and not: the periods 11, 3 and 2 have no common divisor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from perf.load.protocols import Protocol, Request
from perf.load.workload import prompts

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
FEATURES: Mapping[Protocol, tuple[Fields, ...]] = {
    "openai_chat": (
        *_COMMON,
        {"logprobs": True, "top_logprobs": 3, "return_token_ids": True, "ignore_eos": True},
        # The definition of a function takes half of the context.
        {"tools": [_TOOL], "tool_choice": "required", "parallel_tool_calls": False, "truncate_max_tokens": True},
        {"tools": [_TOOL], "truncate_max_tokens": True},
    ),
    "openai_completions": (
        *_COMMON,
        {"logprobs": 3, "return_token_ids": True, "ignore_eos": True},
        {"guided_choice": ["a list of the names of the attributes of an object", "a dictionary of all of them"]},
        {"echo": True, "stop": "\n"},
    ),
}
"""Fields by protocol, the rarer the later."""


def mixed(checkpoint: Path, count: int) -> dict[Protocol, list[Request]]:
    """Return the first `count` requests of each protocol. Raises ValueError if the text has too few prompts."""
    texts = prompts(checkpoint, min(count, _DIFFERENT_PROMPTS), PROMPT_TOKENS)
    return {
        protocol: [_request(protocol, number, texts[number % len(texts)]) for number in range(count)]
        for protocol in FEATURES
    }


def _request(protocol: Protocol, number: int, text: str) -> Request:
    features = FEATURES[protocol]
    fields: dict[str, object] = {
        "max_tokens": MIN_OUTPUT + 37 * number % (MAX_OUTPUT - MIN_OUTPUT + 1),
        "seed": number,
        "stream": number % 2 == 0,
        **SAMPLINGS[number % len(SAMPLINGS)],
        **features[number % len(features)],
    }
    if protocol == "openai_completions" and number % 5 == 0:
        fields["prompt"] = [text, text[:40]]
    return Request(text, 0, fields=fields)
