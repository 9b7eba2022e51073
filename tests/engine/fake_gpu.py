"""A GPU without a device: tensors on `cuda:0` have a shape, a dtype and a device, and no values.

PyTorch's FakeTensorMode refuses an operation on tensors of different devices or of wrong dtypes, so that a whole step
of the engine is checked without a GPU. Values that the host reads are constants, and each read is counted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import bitsandbytes  # noqa: F401 - imported before PyTorch seems to have a GPU, whose functions it would look for
import pytest
import torch
from llama_engine.kernels.gpu.elementwise import SEPARATE
from llama_engine.kernels.gpu.varlen_attention import varlen_attention
from llama_engine.model import load_plan
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU, DEVICE = torch.device("cpu"), torch.device("cuda", 0)
FREE = 80 << 30
TOKEN = 20
"""The token that every row samples, and every other integer that is read: "1" in the embedded vocabulary."""

aten = torch.ops.aten
Function = Callable[..., object]
Arguments = tuple[object, ...]
Keywords = Mapping[str, object]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class hook
    """Counts reads that the host waits for, and copies that wait for the GPU's queue."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clear()

    def clear(self) -> None:
        self.waits = self.blocking_copies = 0

    def __torch_dispatch__(
        self, func: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        tensors = [tensor for tensor in inputs if isinstance(tensor, FakeTensor)]
        for tensor in tensors:
            # Otherwise a tensor made of numbers remembers them, and a read of it would not count.
            tensor.constant = None
        assert isinstance(func, torch._ops.OpOverload)
        # Its kernels take addresses, and FakeTensorMode doesn't check them.
        assert func.namespace != "bitsandbytes" or all(tensor.device == DEVICE for tensor in inputs), str(func)
        if func in (aten.item.default, aten._local_scalar_dense.default):
            self.waits += 1
            return 0.5 if tensors[0].is_floating_point() else TOKEN
        kwargs = kwargs or {}
        source, target = getattr(args[0], "device", None) if args else None, kwargs.get("device")
        if func in _COPIES and target == DEVICE and source != DEVICE:
            self.blocking_copies += not (kwargs.get("non_blocking") or any(value is True for value in args))
            if isinstance(args[0], torch.Tensor) and not isinstance(args[0], FakeTensor):
                # FakeTensorMode would copy the values of a tensor made outside of it.
                dtype = kwargs.get("dtype") or args[0].dtype
                assert isinstance(dtype, torch.dtype)
                return torch.empty(args[0].shape, dtype=dtype, device=DEVICE)
        if func in _COPIES and target == CPU and source == DEVICE:
            self.waits += 1
        return func(*args, **kwargs)


_COPIES = (aten.to.dtype_layout, aten.to.device, aten._to_copy.default)


_HOST_METHODS: tuple[Function, ...] = (torch.Tensor.__getitem__, torch.Tensor.numpy)


class Indexing(TorchFunctionMode):
    """Replaces methods that ask for a device which PyTorch's CPU build doesn't have by their operators.

    Pinned memory is the host's, with values.
    """

    def __torch_function__(
        self, func: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        # The CPU build has no pinned memory.
        pinned = bool(kwargs and kwargs.get("pin_memory"))
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        tensor = args[0] if args else None
        written = isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor)
        if (func in (torch.empty, torch.zeros) and pinned) or (func in _HOST_METHODS and written):
            # The host writes values into pinned memory, through views of it.
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is torch.Tensor.pin_memory:
            return tensor
        if func is torch.Tensor.data_ptr and isinstance(tensor, FakeTensor):
            return tensor.untyped_storage()._cdata
        if not (isinstance(tensor, torch.Tensor) and tensor.device == DEVICE):
            return func(*args, **kwargs)
        if func is torch.Tensor.__getitem__:
            return _get(tensor, args[1])
        if func is torch.Tensor.__setitem__:
            _set(tensor, args[1], args[2])
            return None
        if func is torch.Tensor.__invert__:
            func = aten.bitwise_not.default
        elif func is torch.Tensor.copy_:
            func = aten.copy_.default
        return func(*args, **kwargs)


def _constants(shape: Sequence[int]) -> object:
    return [_constants(shape[1:]) for _ in range(shape[0])] if shape else TOKEN


def _index(tensor: torch.Tensor, key: object) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Apply slices, numbers and None; return the view, and for each of its dimensions the tensor that indexes it."""
    indices: list[torch.Tensor | None] = []
    for part in key if isinstance(key, tuple) else (key,):
        dim = len(indices)
        if isinstance(part, int):
            tensor = aten.select.int(tensor, dim, part)
            continue
        if part is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(part, slice):
            stop = tensor.shape[dim] if part.stop is None else part.stop
            tensor = aten.slice.Tensor(tensor, dim, part.start or 0, stop)
        elif isinstance(part, list):
            # PyTorch makes a tensor of it and waits for its copy.
            part = torch.tensor(part).to(DEVICE)
        elif part is Ellipsis:
            assert not indices, "an ellipsis is the first key, before None"
            indices += [None] * (tensor.dim() - 1)
        indices.append(part if isinstance(part, torch.Tensor) else None)
    return tensor, indices


def _get(tensor: torch.Tensor, key: object) -> object:
    view, indices = _index(tensor, key)
    return view if all(index is None for index in indices) else aten.index.Tensor(view, indices)


def _set(tensor: torch.Tensor, key: object, value: object) -> None:
    view, indices = _index(tensor, key)
    assert isinstance(value, (torch.Tensor, int, float))
    values = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=tensor.dtype, device=DEVICE)
    if all(index is None for index in indices):
        aten.copy_.default(view, values)
    else:
        aten.index_put_.default(view, indices, values)


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Let PyTorch seem to have a GPU of 80 GiB."""
    recorder = Recorder()

    def tolist(tensor: FakeTensor) -> object:
        recorder.waits += tensor.device == DEVICE
        return _constants(tensor.shape)

    stubs: dict[str, Function] = {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        # As PyTorch does, it refuses a device without an index.
        "set_device": lambda device: torch.device(device).index + 0,
        "mem_get_info": lambda device: (FREE, FREE),
        "memory_reserved": lambda device: 0,
        "memory_allocated": lambda device: 0,
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(FakeTensor, "tolist", tolist)
    # Their verification needs values.
    monkeypatch.setattr(load_plan, "choose_attention", lambda *_: varlen_attention)
    monkeypatch.setattr(load_plan, "choose_elementwise", lambda *_: SEPARATE)
    # The CUDA build's would ask for a driver.
    monkeypatch.setattr("torch._subclasses.fake_tensor.init_gpu_context", lambda device: None)
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), recorder, Indexing():
            yield recorder
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
