"""The text of the comparison, as rows of tokens, each predicted from its own beginning.

By default the text that the embedded checkpoint was not trained on: 3 percent of the documentation of CPython 3.11.7,
314 documents in held_out.json. Any other checkpoint takes a text file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from perf.checkpoint import EMBEDDED

HELD_OUT = Path(__file__).with_name("held_out.json")

MIN_TOKENS = 100
"""Fewer predicted tokens have no 99th percentile."""

Rows = Sequence[Sequence[int]]
"""Rows of token ids, at least 2 in each; all but the first are predicted."""


def from_text(text: str, tokenizer: PreTrainedTokenizerBase, context: int) -> Rows:
    """Cut a text into rows of `context` tokens, at least 2, each after a BOS if the tokenizer has one.

    Raises ValueError for a text with less than MIN_TOKENS to predict.
    """
    # The tokenizer would add a BOS before the first row only.
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    room = context - len(begin)
    rows = [[*begin, *ids[first : first + room]] for first in range(0, len(ids), room)]
    # Without a BOS the last row may have a single token, which nothing predicts.
    rows = [row for row in rows if len(row) > 1]
    if (predicted := sum(len(row) - 1 for row in rows)) < MIN_TOKENS:
        raise ValueError(f"the text has {predicted} tokens to predict; {MIN_TOKENS} are needed")
    return rows


def held_out(context: int) -> tuple[Rows, Mapping[str, object]]:
    """Return the embedded checkpoint's held-out documents, cut into rows, and their origin for the result file."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    documents = json.loads(HELD_OUT.read_text(encoding="utf-8"))
    texts = [f"{tokenizer.bos_token}{document}{tokenizer.eos_token}" for document in documents]
    rows: list[list[int]] = []
    for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        rows += [ids[first : first + context] for first in range(0, len(ids), context) if len(ids) - first > 1]
    return rows, {"text": "held-out documentation of CPython", "python": "3.11.7"}
