"""Imports what every start needs of torch and transformers, without noise.

- OpenMP's threads spin for some 20 µs at the end of a parallel region, not for milliseconds: on cores that others use,
  Triton's server among them, a spinning thread keeps the one it waits for from its core. GOMP_SPINCOUNT and
  OMP_WAIT_POLICY override it. It is of no effect in a process that has imported torch before.
- Garbage collection is paused: it takes 0.2 s of the import and finds nothing. The imported objects are then frozen.

Import this module before any other that imports torch. bitsandbytes and transformers' modelling code, which bring in
TorchDynamo (2 s), are imported by `model.transformers_reader` alone: on a CPU, float and INT8 checkpoints need neither.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _brief_spinning() -> Iterator[None]:
    """Limit the spinning of a libgomp that is loaded meanwhile. It reads the environment once; no child inherits it."""
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
    import torch  # noqa: F401 - its OpenMP runtime reads the environment now


with _without_collecting():
    # What every start uses of transformers.
    for _module in ("configuration_utils", "tokenization_utils_tokenizers", "generation"):
        importlib.import_module(f"transformers.{_module}")
