"""The text of the comparison, in parts of a context, each predicted from its own beginning.

By default alice.txt: chapter VII of Lewis Carroll's "Alice's Adventures in Wonderland" (1865, in the public domain), as
in the Canterbury corpus, a paragraph a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

PROSE = Path(__file__).with_name("alice.txt")

CONTEXT = 512
"""Tokens of a part, where a model allows it."""

MIN_TOKENS = 100
"""Fewer predicted tokens have no 99th percentile."""

Texts = Sequence[Sequence[int]]
"""Token ids, at least 2 in each; all but the first are predicted."""


def from_text(text: str, tokenizer: PreTrainedTokenizerBase, context: int) -> Texts:
    """Cut a text into parts of `context` tokens, at least 2, each after a BOS if the tokenizer has one.

    Raises ValueError for a text with less than MIN_TOKENS to predict.
    """
    # The tokenizer would add a BOS before the first one only.
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    room = context - len(begin)
    texts = [[*begin, *ids[first : first + room]] for first in range(0, len(ids), room)]
    # Without a BOS the last one may have a single token, which nothing predicts.
    texts = [each for each in texts if len(each) > 1]
    if (predicted := sum(len(each) - 1 for each in texts)) < MIN_TOKENS:
        raise ValueError(f"the text has {predicted} tokens to predict; {MIN_TOKENS} are needed")
    return texts
