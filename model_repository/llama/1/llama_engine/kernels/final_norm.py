"""Norms for embeddings in PyTorch, with the same bits on any processor; the kernels have one inside the logits."""

import torch
from torch.nn import functional


def final_norm(hidden: torch.Tensor, gain: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return RMSNorm(hidden) · gain in float32, [n, hidden]; a row has the same bits for any n. gain: [hidden]."""
    hidden = hidden.float()
    return hidden / (sums_of_squares(hidden) / hidden.shape[1] + epsilon).sqrt() * gain.float()


def sums_of_squares(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row's squares, [n, 1]. values: [n, width].

    Halves are added elementwise until one sum is left: a library's sum chooses its order by n and by the processor.
    """
    sums = values * values
    while (width := sums.shape[1]) > 1:
        sums = functional.pad(sums, (0, width % 2))
        sums = sums[:, : -(-width // 2)] + sums[:, -(-width // 2) :]
    return sums
