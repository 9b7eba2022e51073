"""The penalties on tokens that prompt or completion have, by the histories in `SamplingState`.

Their formulas are those of transformers' logits processors and, for OpenAI's, of vLLM.
"""

import torch

_FINITE = torch.finfo(torch.float32).max


def penalize_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Divide positive and multiply negative logits of tokens seen in prompt or completion.

    logits: [batch, vocabulary]. seen: the same, bool. penalty: [batch], > 0, 1 = off. Source: CTRL, arXiv:1909.05858.
    """
    factor = penalty[:, None]
    penalized = torch.where(logits > 0, logits / factor, logits * factor)
    # A penalty near float32's limits can overflow to infinity, which later processors would turn into NaN.
    return torch.where(seen, penalized.clamp(-_FINITE, _FINITE), logits)


def penalize_output(
    logits: torch.Tensor, counts: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor
) -> torch.Tensor:
    """Subtract `frequency` per occurrence in the completion, and `presence` once.

    logits: [batch, vocabulary]. counts: the same, occurrences. frequency, presence: [batch], 0 = off.
    """
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)
