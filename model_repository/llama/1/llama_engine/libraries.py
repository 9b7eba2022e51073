"""Imports torch and the modules of transformers that every start needs, with two optimizations and without a warning.

- OpenMP threads spin for about 20 µs at the end of a parallel region instead of milliseconds: on shared cores a
  spinning thread delays the thread it waits for. GOMP_SPINCOUNT and OMP_WAIT_POLICY override this. It has no effect if
  torch was imported before.
- Garbage collection is paused: it takes 0.2 s of the import and frees nothing. The imported objects are then frozen.
- On CPUs with AVX512-BF16 bitsandbytes warns at its import that the optional package `kernels` (a faster 4-bit product)
  is missing; the warning is dropped.

Import this module before any other that imports torch. bitsandbytes and transformers' modelling code bring in
TorchDynamo (2 s). `model.transformers_reader` imports both, `kernels.gpu.exact_int8` imports bitsandbytes, and nothing
else does: on a CPU, float and INT8 checkpoints need neither.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _brief_spinning() -> Iterator[None]:
    """Set GOMP_SPINCOUNT while libgomp is loaded, which reads it once; restore it so that no child inherits it."""
    is_set = "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ
    if not is_set:
        os.environ["GOMP_SPINCOUNT"] = "1000"
    try:
        yield
    finally:
        if not is_set:
            del os.environ["GOMP_SPINCOUNT"]


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Pause garbage collection while modules are imported, and exclude all existing objects from later collections."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


with _without_collecting(), _brief_spinning():
    import torch  # noqa: F401 - loads libgomp, which reads the environment

# This must precede any import of bitsandbytes.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: "Failed to load CPU gemm_4bit_forward" not in str(record.msg)
)

with _without_collecting():
    # The modules of transformers that every start uses.
    for _module in ("configuration_utils", "tokenization_utils_tokenizers", "generation"):
        importlib.import_module(f"transformers.{_module}")
