"""A stand-in for CUDA graphs that runs on a CPU: the same operations on the same memory, and no host code.

What makes a computation fit for a CUDA graph can be seen without a GPU: everything that Python decided while it was
captured is fixed, everything it read from a tensor is read anew, results lie where they lay, and nothing may look at a
value on the host. This keeps PyTorch's operations (below autograd, where kernels are chosen) and runs them again.
Unlike a GPU's, a capture here also computes, and a CPU tensor's `tolist()` reads memory without an operation to see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Action = Callable[[], None]

WAITING = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten.equal.default",
}
"""Operations whose result the host has to know; a stream that is being captured doesn't permit them."""

FROM_THE_HOST = "aten.lift_fresh.default"
"""A tensor that Python made of values: on a GPU a copy from the host, unless it is a single one, which is a fill."""


@dataclass
class _Operation:
    """One operation with its arguments and the tensors that it returned."""

    function: Callable[..., object]
    arguments: tuple[object, ...]
    named: dict[str, object]
    results: list[torch.Tensor]

    def again(self) -> None:
        """Compute it from what its arguments hold now, into the memory it had."""
        results = _tensors(self.function(*self.arguments, **self.named))
        for old, new in zip(self.results, results, strict=True):
            # A view, or what was written to in place, lies there already.
            if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                old.copy_(new)


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]  # TorchDispatchMode isn't annotated
    """Keeps the operations that are made under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Make one operation and keep it."""
        result = func(*args, **(kwargs or {}))
        copied = str(func) == FROM_THE_HOST and any(tensor.dim() for tensor in _tensors(result))
        if str(func) in WAITING or copied:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        self.operations.append(_Operation(func, args, kwargs or {}, _tensors(result)))
        return result

    def replay(self) -> None:
        """Make all of them again."""
        for operation in self.operations:
            operation.again()


class Recorder:
    """A `Capture` that counts. captured: actions that were kept. replayed: how often they were made again.

    failing: the numbers of the replays, from 0, that raise instead.
    """

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0
        self.failing = range(0)

    def __call__(self, action: Action) -> Action:
        """Keep what an action does; as on a GPU it is run once before."""
        action()
        with Recording() as recording:
            action()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            if self.replayed - 1 in self.failing:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            recording.replay()

        return replay


def _tensors(result: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
