"""Rows of tokens: documents packed one after the other, every row beginning where a document begins.

Batch number n depends on the seed and on n alone, so a resumed run sees exactly what the uninterrupted one would.
"""

import random
from collections import deque
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from models.train_pydoc_llama.sources import Document
from models.train_pydoc_llama.views import pieces, plain_view, random_view

MIN_REMAINDER = 24


@dataclass
class BatchSource:
    """Batches of `tokens_per_batch` tokens as int64 [rows, length]; epochs follow each other without an end."""

    documents: list[Document]
    tokenizer: PreTrainedTokenizerFast
    tokens_per_batch: int
    seed: int

    def __post_init__(self) -> None:
        self._epoch = -1
        self._stream: list[list[int]] = []
        self._taken = 0

    def skip_to(self, epoch: int, taken: int) -> None:
        """Continue inside an epoch after `taken` documents of it."""
        self._start_epoch(epoch)
        self._taken = taken

    def position(self) -> tuple[int, int]:
        """Return the arguments with which `skip_to` continues here."""
        return self._epoch, self._taken

    def next_batch(self, length: int) -> Tensor:
        """Return rows of `length` tokens; none is padded."""
        remainders: deque[list[int]] = deque()
        rows = []
        for _ in range(self.tokens_per_batch // length):
            row = list(self._next_document())
            while len(row) < length:
                row += remainders.popleft() if remainders else self._next_document()
            if len(row) - length >= MIN_REMAINDER:
                remainders.append(row[length:])
            rows.append(row[:length])
        return torch.tensor(rows)

    def _next_document(self) -> list[int]:
        if self._taken >= len(self._stream):
            self._start_epoch(self._epoch + 1)
        self._taken += 1
        return self._stream[self._taken - 1]

    def _start_epoch(self, epoch: int) -> None:
        draw = random.Random(f"{self.seed} {epoch}")
        texts = [random_view(piece, draw) for document in self.documents for piece in pieces(document, draw)]
        draw.shuffle(texts)
        self._stream = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        self._epoch, self._taken = epoch, 0


def held_out_rows(documents: list[Document], tokenizer: PreTrainedTokenizerFast, length: int) -> list[list[int]]:
    """Return every held-out document as `<s>text</s>`, cut into rows of at most `length` tokens."""
    rows: list[list[int]] = []
    for ids in tokenizer([plain_view(document) for document in documents], add_special_tokens=False)["input_ids"]:
        rows += [ids[start : start + length] for start in range(0, len(ids), length) if len(ids) - start > 1]
    return rows


def packed_rows(
    documents: list[Document], tokenizer: PreTrainedTokenizerFast, length: int, orders: int
) -> list[list[int]]:
    """Return the documents one after the other in rows of `length` tokens, once for each of `orders` random orders.

    So each text stands at several positions, and positions can be compared.
    """
    rows: list[list[int]] = []
    for order in range(orders):
        shuffled = random.Random(order).sample(documents, len(documents))
        texts = [plain_view(document) for document in shuffled]
        ids = list(chain.from_iterable(tokenizer(texts, add_special_tokens=False)["input_ids"]))
        rows += [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    return rows
