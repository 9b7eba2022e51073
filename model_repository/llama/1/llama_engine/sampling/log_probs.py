"""Log probabilities of tokens: the log softmax of the logits as the model computes them, before bias and penalties.

Sums are in double precision, so that rounded to float32 a row's values don't depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenLogProbs:
    """One token of a text. rank: 1 is the most likely. top: the most likely tokens and their log probabilities."""

    token: int
    log_prob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def log_probs_of(logits: torch.Tensor, tokens: torch.Tensor, top: Sequence[int]) -> list[TokenLogProbs]:
    """Return the log probabilities of tokens [rows], given logits [rows, vocabulary], float32.

    top: for each row, how many of the most likely tokens are reported.
    """
    chosen = logits.gather(1, tokens[:, None])
    total = logits.double().logsumexp(-1)
    chosen_log_probs = (chosen[:, 0].double() - total).float().tolist()
    ranks = ((logits > chosen).sum(-1) + 1).tolist()
    best: list[tuple[tuple[int, float], ...]] = [()] * len(top)
    # By count, so that a row's best don't depend on how many its neighbours ask for.
    for count in sorted(set(top) - {0}):
        rows = [row for row, requested in enumerate(top) if requested == count]
        values, ids = logits[rows].topk(min(count, logits.shape[1]))
        values = (values.double() - total[rows, None]).float()
        for row, row_ids, row_values in zip(rows, ids.tolist(), values.tolist(), strict=True):
            best[row] = tuple(zip(row_ids, row_values, strict=True))
    return [TokenLogProbs(*values) for values in zip(tokens.tolist(), chosen_log_probs, ranks, best, strict=True)]
