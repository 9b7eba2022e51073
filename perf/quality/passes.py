"""Both models over the same rows of text, in bounded memory.

A row is read alone: there is no padding, and under an outlier threshold, where bitsandbytes looks for the outlier
columns in everything it is given at once, that is one text's own tokens. The head is applied to a few positions at a
time, because the logits of a whole row (4,096 positions times 32,000 tokens) would be larger than the activations of
the rest of the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM

from perf.quality.divergence import Tokens, compare

POSITIONS_AT_ONCE = 256


@torch.inference_mode()
def both(
    reference: LlamaForCausalLM, candidate: LlamaForCausalLM, rows: Sequence[Sequence[int]], progress: tqdm[NoReturn]
) -> Tokens:
    """Predict every token but each row's first with both models; `progress` counts the tokens. No row: ValueError."""
    if not rows:
        raise ValueError("no rows to compare the models on")
    parts = []
    for row in rows:
        ids = torch.tensor([row], device=reference.device)
        expected, got = _hidden(reference, ids), _hidden(candidate, ids)
        for first in range(0, len(row) - 1, POSITIONS_AT_ONCE):
            last = min(first + POSITIONS_AT_ONCE, len(row) - 1)
            parts.append(
                compare(
                    reference.lm_head(expected[first:last]),
                    candidate.lm_head(got[first:last]),
                    ids[0, first + 1 : last + 1],
                )
            )
        progress.update(len(row) - 1)
    return Tokens.joined(parts)


def _hidden(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return the last layer's output [tokens, hidden] of one row."""
    output: Tensor = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return output[0]
