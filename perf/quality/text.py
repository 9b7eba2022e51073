"""The text of the comparison, in parts of a context, each predicted from its own beginning.

By default the text that the embedded checkpoint was not trained on: 3 percent of the documentation of CPython 3.11.7,
314 documents in held_out.json. Any other checkpoint takes a text file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from perf.checkpoint import EMBEDDED

HELD_OUT = Path(__file__).with_name("held_out.json")

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


def held_out(context: int) -> tuple[Texts, str]:
    """Return the embedded checkpoint's held-out documents, cut likewise, and their origin for the result file."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    documents = json.loads(HELD_OUT.read_text(encoding="utf-8"))
    whole = [f"{tokenizer.bos_token}{document}{tokenizer.eos_token}" for document in documents]
    texts: list[list[int]] = []
    for ids in tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"]:
        texts += [ids[first : first + context] for first in range(0, len(ids), context) if len(ids) - first > 1]
    return texts, "held-out documentation of CPython 3.11.7"
