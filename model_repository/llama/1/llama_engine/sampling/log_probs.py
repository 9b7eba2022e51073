"""Log probabilities of tokens: the log softmax of the model's raw logits, before bias and penalties.

Sums are in double precision: rounded to float32, a row's values don't depend on the other rows of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenLogProbs:
    """The log probability of one token. rank: 1 is the most likely. top: ids and log probabilities of the likeliest."""

    token: int
    log_prob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def log_probs_of(logits: torch.Tensor, tokens: torch.Tensor, top: Sequence[int]) -> list[TokenLogProbs]:
    """Return the log probabilities of tokens [rows], given logits [rows, vocabulary], float32.

    top: number of most likely tokens to return for each row.
    """
    chosen = logits.gather(1, tokens[:, None])
    total = logits.double().logsumexp(-1)
    chosen_log_probs = (chosen[:, 0].double() - total).float().tolist()
    ranks = ((logits > chosen).sum(-1) + 1).tolist()
    best: list[tuple[tuple[int, float], ...]] = [()] * len(top)
    # One topk call per count: the order of equal logits depends on the count, which must be the row's.
    for count in sorted(set(top) - {0}):
        rows = [row for row, requested in enumerate(top) if requested == count]
        values, ids = logits[rows].topk(min(count, logits.shape[1]))
        values = (values.double() - total[rows, None]).float()
        for row, row_ids, row_values in zip(rows, ids.tolist(), values.tolist(), strict=True):
            best[row] = tuple(zip(row_ids, row_values, strict=True))
    return [TokenLogProbs(*values) for values in zip(tokens.tolist(), chosen_log_probs, ranks, best, strict=True)]
