"""Held-out perplexity: exp of the mean negative log likelihood over all predicted tokens."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor
from transformers import PreTrainedModel

ROWS_PER_BATCH = 16


@torch.inference_mode()
def perplexity(model: PreTrainedModel, rows: list[list[int]], pad: int) -> float:
    """Return the perplexity of rows, each after its first token. Leaves the model in eval mode."""
    model.train(False)
    total, count = 0.0, 0
    ordered = sorted(rows, key=len)  # rows of similar length together: little padding
    for start in range(0, len(ordered), ROWS_PER_BATCH):
        group = ordered[start : start + ROWS_PER_BATCH]
        longest = max(map(len, group))
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in group])
        # Padding stands on the right and attention is causal, so it needs no mask; its losses are left out.
        total += float(_losses(model, ids, pad).sum())
        count += sum(len(row) - 1 for row in group)
    return math.exp(total / count)


@torch.inference_mode()
def perplexity_by_position(model: PreTrainedModel, rows: list[list[int]], edges: Sequence[int]) -> list[float]:
    """Return the perplexity of the tokens at positions from each of `edges` to the next, without position 0.

    Rows have as many tokens as the last edge says. Leaves the model in eval mode.
    """
    model.train(False)
    total = torch.zeros(edges[-1] - 1, dtype=torch.float64)
    for row in rows:
        total += _losses(model, torch.tensor([row])).double()[0]
    means = total / len(rows)
    return [math.exp(means[max(first - 1, 0) : end - 1].mean()) for first, end in pairwise(edges)]


def _losses(model: PreTrainedModel, ids: Tensor, pad: int = -100) -> Tensor:
    """Return the negative log likelihoods [rows, length - 1] of tokens [rows, length] but the first, 0 for padding."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], ignore_index=pad, reduction="none")
