"""Held-out perplexity: exp of the mean negative log likelihood over all predicted tokens."""

import math

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
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
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=pad, reduction="sum")
        total += float(losses)
        count += sum(len(row) - 1 for row in group)
    return math.exp(total / count)
