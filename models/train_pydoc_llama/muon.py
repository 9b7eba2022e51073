"""Muon for the hidden matrices: momentum whose singular values are all pushed to one before it is applied.

torch.optim.Muon does the same, one matrix at a time and in bfloat16, which takes seconds a step on a CPU without
bfloat16 units; here all matrices of one shape are orthogonalised together in float32.
Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import overload

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Every parameter must be a matrix. `lr` is the size of an update's singular values; shapes run in parallel."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float, weight_decay: float, workers: Executor
    ) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.workers = workers

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply one update; a closure is not supported."""
        if closure is not None:
            raise ValueError("Muon.step: closure is not supported")
        for group in self.param_groups:
            by_shape: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                by_shape[parameter.shape].append(parameter)
            settings = (group["lr"], group["momentum"], group["weight_decay"])
            largest_first = sorted(by_shape.values(), key=lambda parameters: -sum(item.numel() for item in parameters))
            jobs = [self.workers.submit(self._step_shape, parameters, *settings) for parameters in largest_first]
            for job in jobs:
                job.result()
        return None

    @torch.no_grad()
    def _step_shape(self, parameters: list[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        directions = []
        for parameter in parameters:
            if parameter.grad is None:
                raise ValueError(f"Muon.step: a matrix of shape {tuple(parameter.shape)} has no gradient")
            average = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            average.lerp_(parameter.grad, 1 - momentum)
            directions.append(parameter.grad.lerp(average, momentum))
        rows, columns = parameters[0].shape
        scale = max(1.0, rows / columns) ** 0.5
        for parameter, update in zip(parameters, orthogonalized(torch.stack(directions)), strict=True):
            parameter.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * scale)


def orthogonalized(matrices: Tensor) -> Tensor:
    """[n, rows, columns] -> the same shape, singular values near one (five Newton-Schulz steps)."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
