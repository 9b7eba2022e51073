"""How many requests this instance has accepted and answered, in shared memory that the supervisor reads at a drain.

Triton unloads a model when the last of its request objects is gone, and keeps some after the last answer, or for ever.
The supervisor therefore looks at what the model has answered. llama_unary has the same few lines.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path

FILES = "TRITON_LLAMA_REQUEST_COUNTS"
"""Environment variable: the beginning of the file's path, set by the supervisor. Without it nothing is written."""


class RequestCounts:
    """Two counters, each written by one thread: 8 bytes each, in the machine's order, accepted first."""

    def __init__(self, environment: Mapping[str, str], model: str) -> None:
        """model: its name in Triton. Raises OSError if the file can't be written."""
        beginning = environment.get(FILES)
        self._file = Path(f"{beginning}{model}-{os.getpid()}") if beginning else None
        memory: mmap.mmap | bytearray = bytearray(16)
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            with self._file.open("xb+") as file:
                file.truncate(len(memory))
                memory = mmap.mmap(file.fileno(), len(memory))
        self._counts = memoryview(memory).cast("Q")

    def add_accepted(self, requests: int) -> None:
        """Count requests that Triton has handed over, before anything else is done with them."""
        self._counts[0] += requests

    def add_answered(self, requests: int = 1) -> None:
        """Count requests whose final response Triton has, or, under `scheduling: batch`, when `execute` returns."""
        self._counts[1] += requests

    def close(self) -> None:
        """Remove the file: Triton ends the model itself, so every request is answered."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
