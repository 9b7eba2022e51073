"""Muon for the hidden matrices: momentum whose singular values are all pushed to one before it is applied.

torch.optim.Muon does the same, one matrix at a time and in bfloat16, which takes seconds a step on a CPU without
bfloat16 units; here all matrices of one shape are orthogonalised together in float32.
Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
"""

from collections import defaultdict
from concurrent.futures import Executor

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon:
    """The optimizer of some matrices, as parameters of a model. averages: of their gradients, the state between steps.

    Matrices of one shape are updated together, and shapes in parallel.
    """

    def __init__(self, matrices: list[Tensor], momentum: float, weight_decay: float, workers: Executor) -> None:
        self.averages = [torch.zeros_like(matrix) for matrix in matrices]
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._workers = workers
        by_shape: defaultdict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for matrix, average in zip(matrices, self.averages, strict=True):
            by_shape[matrix.shape].append((matrix, average))
        self._largest_first = sorted(by_shape.values(), key=lambda pairs: -len(pairs) * pairs[0][0].numel())

    def step(self, lr: float) -> None:
        """Apply one update. lr: the size of its singular values. Every matrix must have a gradient."""
        for done in [self._workers.submit(self._step_shape, pairs, lr) for pairs in self._largest_first]:
            done.result()

    @torch.no_grad()
    def _step_shape(self, pairs: list[tuple[Tensor, Tensor]], lr: float) -> None:
        directions = []
        for matrix, average in pairs:
            assert matrix.grad is not None
            average.lerp_(matrix.grad, 1 - self._momentum)
            directions.append(matrix.grad.lerp(average, self._momentum))
        rows, columns = pairs[0][0].shape
        scale = max(1.0, rows / columns) ** 0.5
        for (matrix, _), update in zip(pairs, orthogonalized(torch.stack(directions)), strict=True):
            matrix.mul_(1 - lr * self._weight_decay).add_(update, alpha=-lr * scale)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return matrices [n, rows, columns] with singular values near one (five Newton-Schulz steps)."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
