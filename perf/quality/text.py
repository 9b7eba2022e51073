"""The text of the comparison, as rows of tokens, each predicted from its own beginning.

By default the text that the embedded checkpoint was not trained on: 3 percent of the running CPython's documentation,
rebuilt from the installation. The split depends on each document's beginning, so another Python version has other text,
still none that was trained on, and other figures; its origin states it. Any other checkpoint takes a text file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llama_engine.model.loader import EMBEDDED
from transformers import PreTrainedTokenizerBase

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
    """Return the embedded checkpoint's held-out documents, and where they come from, for the result file."""
    # Imported here: they exist in this repository only, and a text file doesn't need them.
    from models.train_pydoc_llama.batches import held_out_rows
    from models.train_pydoc_llama.corpus import build_corpus
    from models.train_pydoc_llama.tokenizer import load_tokenizer

    corpus = build_corpus()
    facts = corpus.describe()
    origin = {"text": "held-out documentation of CPython", "python": facts["python"], "corpus_sha256": facts["sha256"]}
    return held_out_rows(corpus.held_out, load_tokenizer(EMBEDDED), context), origin
