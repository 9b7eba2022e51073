"""Imports what every start needs of torch, transformers and bitsandbytes, quickly and without noise.

- OpenMP's threads spin for some 20 µs at the end of a parallel region, not for milliseconds: on cores that others use,
  Triton's server among them, a spinning thread keeps the one it waits for from its core (perf/LOG.md). GOMP_SPINCOUNT
  and OMP_WAIT_POLICY override it. It is of no effect in a process that has imported torch before.
- Garbage collection is paused: it takes 0.2 s of the import and finds nothing. The imported objects are then frozen.
- bitsandbytes decorates functions for 4-bit weights and optimizers with `torch.compile`, which loads the whole compiler
  (Inductor, sympy, 0.9 s). `_compile_on_first_call` defers that to the first call; 8-bit weights never make one.
- transformers' modelling code and Auto classes are left to `import_modelling`: on a CPU, float and INT8 checkpoints are
  read without them. They bring in TorchDynamo, torch.distributed and SymPy, 1.2 s.
- Two warnings are dropped: on CPUs with AVX512-BF16, that the optional package `kernels`, a faster 4-bit product, is
  missing; and at every 8-bit product of a model that is not in float16, that activations are cast.

Import bitsandbytes' layers from here only, and this module before any other that imports transformers.
"""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def _brief_spinning() -> Iterator[None]:
    """Limit the spinning of a libgomp that is loaded meanwhile. It reads the environment once; no child inherits it."""
    given = "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ
    if not given:
        os.environ["GOMP_SPINCOUNT"] = "1000"
    try:
        yield
    finally:
        if not given:
            del os.environ["GOMP_SPINCOUNT"]


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Pause garbage collection while modules are imported, and freeze what exists then."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


with _without_collecting(), _brief_spinning():
    import torch


def _compile_on_first_call(function: Callable[P, T] | None = None, **options: object) -> object:
    """Stand in for `torch.compile` as a decorator, with or without options."""

    def decorate(decorated: Callable[P, T]) -> Callable[P, T]:
        @functools.cache
        def compiled() -> Callable[P, T]:
            function: Callable[P, T] = torch.compile(decorated, **options)  # type: ignore[call-overload]  # any options
            return function

        @functools.wraps(decorated)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            return compiled()(*args, **kwargs)

        return call

    return decorate if function is None else decorate(function)


def _drop(logger: str, text: str) -> None:
    """Drop the records of a logger whose message contains the text."""
    logging.getLogger(logger).addFilter(lambda record: text not in str(record.msg))


_drop("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward")
_drop("bitsandbytes.autograd._functions", "inputs will be cast")

_compile_now = torch.compile
torch.compile = _compile_on_first_call  # type: ignore[assignment]  # no overloads, fewer options
try:
    with _without_collecting():
        from bitsandbytes.functional import int8_vectorwise_quant
        from bitsandbytes.nn.modules import Int8Params, Linear4bit, Linear8bitLt

        # What every start uses of transformers.
        for _module in ("configuration_utils", "tokenization_utils_tokenizers", "generation"):
            importlib.import_module(f"transformers.{_module}")
finally:
    torch.compile = _compile_now


@functools.cache
def import_modelling() -> None:
    """Import what transformers' Auto classes import when they load a Llama."""
    with _without_collecting():
        for module in ("models.llama.modeling_llama", "models.auto", "integrations.bitsandbytes"):
            importlib.import_module(f"transformers.{module}")


__all__ = ["Int8Params", "Linear4bit", "Linear8bitLt", "import_modelling", "int8_vectorwise_quant"]
