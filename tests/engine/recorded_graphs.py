"""A stand-in for CUDA graphs that runs on a CPU: the same operations on the same memory, without host code.

It shows without a GPU whether a computation can be captured: what Python decides during the capture is fixed, tensors
are read anew, results keep their memory, and the host may look at no value. It records PyTorch's operations (below
autograd, where kernels are chosen) and runs them again. Unlike on a GPU, a capture also computes, and a CPU tensor's
`tolist()` reads memory without an operation that could be refused.
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
"""Operations whose result the host needs; a stream in capture refuses them."""

FROM_THE_HOST = "aten.lift_fresh.default"
"""A tensor made of Python values: on a GPU a copy from the host, except for a single value, which is a fill."""


@dataclass
class _Operation:
    """One operation, its arguments and the tensors it returned."""

    function: Callable[..., object]
    arguments: tuple[object, ...]
    named: dict[str, object]
    results: list[torch.Tensor]

    def again(self) -> None:
        """Compute it from the present values of its arguments, into the same memory."""
        results = _tensors(self.function(*self.arguments, **self.named))
        for old, new in zip(self.results, results, strict=True):
            # Views and results of in-place operations are there already.
            if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                old.copy_(new)


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]  # TorchDispatchMode isn't annotated
    """Records the operations that run under it."""

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
        """Run one operation and record it."""
        result = func(*args, **(kwargs or {}))
        copied = str(func) == FROM_THE_HOST and any(tensor.dim() for tensor in _tensors(result))
        if str(func) in WAITING or copied:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        self.operations.append(_Operation(func, args, kwargs or {}, _tensors(result)))
        return result

    def replay(self) -> None:
        """Run all of them again."""
        for operation in self.operations:
            operation.again()


class Recorder:
    """A `Capture` that counts captures and replays. failing: numbers of the replays, from 0, that raise instead."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0
        self.failing = range(0)

    def __call__(self, action: Action) -> Action:
        """Record what an action does; as on a GPU it runs once before."""
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
