"""The requests of a soak: prompts, lengths and sampling parameters of every kind, and requests that must be refused.

Independent of the checkpoint: a prompt has at most as many tokens as characters.
"""

from __future__ import annotations

import random
from pydoc_data.topics import topics

from triton_llama.sampling_params import SamplingParams

LONGEST_PROMPT = 240
LONGEST_OUTPUT = 200
"""Tokens; with the longest prompt it fits into a `max_model_len` of 512."""

_MEAN_OUTPUT = 40
_TEXT = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore").decode()

FIXED_PROMPT = "Return a list of"
FIXED = SamplingParams(max_tokens=24, min_tokens=24, temperature=0.0)
"""The request that is repeated: greedy, so its text must never change."""

LONG = SamplingParams(max_tokens=LONGEST_OUTPUT, min_tokens=LONGEST_OUTPUT, temperature=0.9)

INVALID: tuple[SamplingParams, ...] = (
    SamplingParams(max_tokens=0),
    SamplingParams(max_tokens=2**31 - 1),
    SamplingParams(max_tokens=4, min_tokens=5),
    SamplingParams(temperature=9.0),
    SamplingParams(top_p=1.5),
    SamplingParams(top_k=-1),
    SamplingParams(repetition_penalty=-1.0),
    SamplingParams(presence_penalty=3.0),
    SamplingParams(stop_words=["x"] * 17),
)
"""Each violates one bound of the contract."""


def prompt(randomness: random.Random) -> str:
    """Return a passage of Python's documentation."""
    length = randomness.randint(8, LONGEST_PROMPT)
    first = randomness.randrange(len(_TEXT) - length)
    # White space alone might be no token.
    return "See " + _TEXT[first : first + length - len("See ")]


def params(randomness: random.Random) -> SamplingParams:
    """Return sampling parameters: mostly few tokens; greedy or sampled; an exact length or a maximum."""
    length = _length(randomness)
    sampled = randomness.random() < 0.6
    return SamplingParams(
        max_tokens=length,
        min_tokens=length if randomness.random() < 0.7 else 0,
        temperature=randomness.choice([0.5, 0.9, 1.4]) if sampled else 0.0,
        top_k=randomness.choice([0, 0, 20]) if sampled else 0,
        top_p=randomness.choice([1.0, 0.9]) if sampled else 1.0,
        repetition_penalty=randomness.choice([1.0, 1.0, 1.2]),
        frequency_penalty=randomness.choice([0.0, 0.0, 0.5]),
        stop_words=randomness.choice([(), (), (".",), ("\n\n", "def ")]),
        bad_words=randomness.choice([(), (), (), ("the",)]),
        exclude_input_in_output=randomness.random() < 0.8,
    )


def plain_params(randomness: random.Random) -> SamplingParams:
    """Return sampling parameters that every client has: an exact length and a temperature."""
    length = _length(randomness)
    return SamplingParams(max_tokens=length, min_tokens=length, temperature=randomness.choice([0.0, 0.9]))


def _length(randomness: random.Random) -> int:
    return min(1 + int(randomness.expovariate(1 / _MEAN_OUTPUT)), LONGEST_OUTPUT)
