"""The load: prompts of equal length and output lengths of equal mean, the same for every server and every run.

The article's setting is 200 new tokens for every request. Equal lengths hide what in-flight batching is for, so there
are two more mixes of the same mean. Lengths are the quantiles of their distribution in a shuffled order, not samples of
it: 32 of them already have the distribution's mean, and two runs of different size measure the same load.
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

from transformers import AutoTokenizer

from perf.load.protocols import Request

Mix = Literal["equal", "uniform", "geometric"]

PROMPT_TOKENS = 100
MEAN_OUTPUT = 200
MAX_OUTPUT = 800


def requests(checkpoint: Path, mix: Mix, count: int, mean: int = MEAN_OUTPUT) -> list[Request]:
    """Return `count` requests of that mix; deterministic. Raises ValueError if the text has too few prompts."""
    texts = prompts(checkpoint, min(count, 64)) if count else []
    return [Request(texts[number % len(texts)], length) for number, length in enumerate(lengths(mix, count, mean))]


def warm_and_measured(checkpoint: Path, mix: Mix, warmup: int, count: int, mean: int = MEAN_OUTPUT) -> list[Request]:
    """Return the warm-up's requests, then `count` others.

    The two are generated apart: each has all lengths of the mix (part of a mix would have another mean), and the
    measured ones are the same whatever comes before.
    """
    return [*requests(checkpoint, mix, warmup, mean), *requests(checkpoint, mix, count, mean)]


def lengths(mix: Mix, count: int, mean: int = MEAN_OUTPUT) -> list[int]:
    """Return `count` output lengths of that mean, to rounding.

    equal: all the mean. uniform: 0.1 to 1.9 times the mean (20 … 380). geometric: 1 to 4 times the mean (… 800), the
    distribution's parameter chosen so that the mean holds in spite of the bound.
    """
    shares = [(index + 0.5) / count for index in range(count)]
    if mix == "equal":
        values = [float(mean)] * count
    elif mix == "uniform":
        values = [mean * (0.1 + 1.8 * share) for share in shares]
    else:
        values = _geometric(shares, mean)
    random.Random(mix).shuffle(values)
    return [max(1, round(value)) for value in values]


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


def _geometric(shares: list[float], mean: int) -> list[float]:
    def bounded(scale: float) -> list[float]:
        return [min(1 - scale * math.log1p(-share), 4.0 * mean) for share in shares]

    low, high = 0.0, 8.0 * mean
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if sum(bounded(middle)) < mean * len(shares) else (low, middle)
    return bounded(high)
