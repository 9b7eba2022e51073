"""The load: prompts of equal length and output lengths of equal mean, the same for every server and every run.

Equal lengths, the article's, hide what in-flight batching is for, so there is another mix of the same mean. Its lengths
are the quantiles of their distribution, in an order in which the first few have nearly its mean: two runs of different
size measure the same load.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal, NamedTuple

from llama_engine.model.loader import LoadedModel
from llama_engine.request.generation_request import GenerationRequest
from transformers import AutoTokenizer

from perf.load.protocols import Request

Mix = Literal["equal", "uniform"]

PROMPT_TOKENS = 100
MEAN_OUTPUT = 200
SLOTS = 32
"""Slots of every server, and the default number of users."""
_GOLDEN = (5**0.5 - 1) / 2
"""The fractions of its multiples are spread evenly, however many there are."""


class Load(NamedTuple):
    """A closed loop. key: of its measurements, before the server's. mix: the kind of its requests.

    requests: returns those of a checkpoint, the same for every server, and how many of them are the warm-up. seconds:
    none is sent later than so long after the first measured one; None: all are sent. bounded: whether it has a
    roofline. round: servers that take turns are compared by what they gave in the same one. perf_analyzer: it is the
    generator, over gRPC, instead of ours over HTTP, which streams where the server does.
    """

    key: str
    mix: str
    users: int
    requests: Callable[[Path], tuple[list[Request], int]]
    seconds: float | None = None
    bounded: bool = False
    round: int | None = None
    perf_analyzer: bool = False


def passages(key: str, mix: Mix, users: int = SLOTS, measured: int = 64, mean: int = MEAN_OUTPUT) -> Load:
    """Return a load of prompts of equal length, after a warm-up of one per user.

    The two are generated apart: each has all lengths of the mix, and the measured ones are the same whatever comes
    before.
    """

    def made(checkpoint: Path) -> tuple[list[Request], int]:
        warmup, rest = (requests(checkpoint, mix, count, mean) for count in (users, measured))
        return [*warmup, *rest], users

    return Load(key, mix, users, made, bounded=True)


def requests(checkpoint: Path, mix: Mix, count: int, mean: int = MEAN_OUTPUT) -> list[Request]:
    """Return `count` requests of that mix; deterministic. Raises ValueError if the text has too few prompts."""
    texts = prompts(checkpoint, min(count, 64))
    return [Request(texts[number % len(texts)], length) for number, length in enumerate(lengths(mix, count, mean))]


def engine_requests(checkpoint: LoadedModel, tokens: Sequence[int]) -> list[GenerationRequest]:
    """Return greedy requests to an engine, of PROMPT_TOKENS tokens each, which end at that many tokens each."""
    texts = prompts(Path(checkpoint.name), len(tokens))
    encoded = [tuple(checkpoint.tokenizer.encode(prompt)) for prompt in texts]
    return [
        GenerationRequest(prompt, tuple(ids), max_tokens=length, min_tokens=length)
        for prompt, ids, length in zip(texts, encoded, tokens, strict=True)
    ]


def lengths(mix: Mix, count: int, mean: int = MEAN_OUTPUT) -> list[int]:
    """Return `count` output lengths of that mean, to rounding.

    equal: all the mean. uniform: 0.1 to 1.9 times the mean (20 … 380).
    """
    values = [1.0] * count
    if mix == "uniform":
        spread = sorted(range(count), key=lambda index: (index + 1) * _GOLDEN % 1)
        for rank, index in enumerate(spread):
            values[index] = 0.1 + 1.8 * (rank + 0.5) / count
    return [max(1, round(mean * value)) for value in values]


def prompts(checkpoint: Path, count: int, tokens: int = PROMPT_TOKENS) -> list[str]:
    """Return `count` different passages of Python's documentation, of about `tokens` tokens each."""
    # The text is longer than any context, on purpose: it is cut below.
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, model_max_length=sys.maxsize)
    read = tokenizer("\n".join(topics[name] for name in sorted(topics)), add_special_tokens=False)["input_ids"]
    # One less than asked for: the BOS is added to them.
    passages = [read[first : first + tokens - 1] for first in range(0, len(read), tokens)][:count]
    if len(passages) < count:
        raise ValueError(f"{count} prompts of {tokens} tokens are needed; the text has {len(passages)}")
    return [str(tokenizer.decode(passage)) for passage in passages]
