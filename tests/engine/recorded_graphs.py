"""A stand-in for CUDA graphs that runs on a CPU: the same operations on the same memory, without host code.

It shows without a GPU whether a computation can be captured: what Python decides during the capture is fixed, tensors
are read anew, results keep their memory, and the host may look at no value. It records PyTorch's operations (below
autograd, where kernels are chosen) and runs them again. Unlike on a GPU, a capture also computes, and a CPU tensor's
`tolist()` reads memory without an operation that could be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Action = Callable[[], None]

WAITING = {f"aten.{name}.default" for name in ("_local_scalar_dense", "nonzero", "masked_select", "equal")}
"""Operations whose result the host needs; a stream in capture refuses them."""

FROM_THE_HOST = "aten.lift_fresh.default"
"""A tensor made of Python values: on a GPU a copy from the host, except for a single value, which is a fill."""


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]  # TorchDispatchMode isn't annotated
    """Records the operations that run under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[tuple[Callable[[], object], list[torch.Tensor]]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run one operation and record it."""
        operation = partial(func, *args, **(kwargs or {}))
        result = operation()
        copied = str(func) == FROM_THE_HOST and any(tensor.dim() for tensor in _tensors(result))
        if str(func) in WAITING or copied:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        self._operations.append((operation, _tensors(result)))
        return result

    def replay(self) -> None:
        """Compute every operation from the present values of its arguments, into the same memory."""
        for operation, results in self._operations:
            for old, new in zip(results, _tensors(operation()), strict=True):
                # Views and results of in-place operations are there already.
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


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
