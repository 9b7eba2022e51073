"""The text of the comparison, as rows of tokens, each predicted from its own beginning.

By default the text that the embedded checkpoint was not trained on: 3 percent of the running CPython's documentation,
rebuilt from the installation. The split depends on each document's beginning, so another Python version has other text,
still none that was trained on, and other figures; `origin` states it. Any other checkpoint takes a text file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_engine.model.loader import EMBEDDED
from transformers import PreTrainedTokenizerBase

FEWEST_TOKENS = 100
"""Fewer predicted tokens have no 99th percentile."""


class TextError(ValueError):
    """A text that can't be read or is too short. The message names the file, what was found and the bound."""


@dataclass(frozen=True)
class Rows:
    """Rows of token ids, each of 2 to `context` tokens. origin: a description of the text, for the result file.

    Raises TextError for less than FEWEST_TOKENS.
    """

    tokens: Sequence[Sequence[int]]
    origin: dict[str, object]

    def __post_init__(self) -> None:
        if self.predicted < FEWEST_TOKENS:
            raise TextError(
                f"{self.origin['text']} has {self.predicted} tokens to predict; {FEWEST_TOKENS} are needed at least"
            )

    @property
    def predicted(self) -> int:
        """The number of predicted tokens: all but each row's first."""
        return sum(len(row) - 1 for row in self.tokens)


def read(path: Path) -> str:
    """Return a UTF-8 file's text. Raises TextError if it can't be read, isn't UTF-8 or is empty."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise TextError(f"can't read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    if not text.strip():
        raise TextError(f"{path} is empty")
    return text


def from_text(text: str, name: str, tokenizer: PreTrainedTokenizerBase, context: int) -> Rows:
    """Cut a text into rows of `context` tokens, at least 2, each after a BOS if the tokenizer has one."""
    # The tokenizer would add a BOS before the first row only.
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    room = context - len(begin)
    rows = [[*begin, *ids[first : first + room]] for first in range(0, len(ids), room)]
    # Without a BOS the last row may have a single token, which nothing predicts.
    return Rows([row for row in rows if len(row) > 1], {"text": name, "characters": len(text)})


def held_out(context: int) -> Rows:
    """Return the embedded checkpoint's held-out documents, rebuilt from the running Python's documentation."""
    # Imported here: they exist in this repository only, and a text file doesn't need them.
    from models.train_pydoc_llama.batches import held_out_rows
    from models.train_pydoc_llama.corpus import build_corpus
    from models.train_pydoc_llama.tokenizer import load_tokenizer

    corpus = build_corpus()
    found = corpus.describe()
    trained_on = json.loads((EMBEDDED / "training.json").read_text(encoding="utf-8"))["data"]
    origin = {
        "text": "held-out documentation of CPython",
        "python": found["python"],
        "documents": len(corpus.held_out),
        "characters": sum(len(document.text) for document in corpus.held_out),
        "corpus_sha256": found["sha256"],
        "same_corpus_as_training": found["sha256"] == trained_on["sha256"],
    }
    return Rows(held_out_rows(corpus.held_out, load_tokenizer(EMBEDDED), context), origin)
