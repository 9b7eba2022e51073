"""What a server takes: VRAM where there is a GPU, else the memory of its process and all below it."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

# Opening what /proc has of a task that has ended, and reading what was opened before.
_GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True)
class ProcessMemory:
    """kind: PSS, the processes' proportional set size: pages that several share, such as libraries, count once.

    VRAM, what is in use on the device, by whomever.
    """

    kind: Literal["PSS", "VRAM"]
    mib: float


def of(pid: int) -> ProcessMemory:
    """Return what the process and its descendants take now.

    Raises FileNotFoundError for a process that has ended, CalledProcessError if nvidia-smi fails.
    """
    taken = vram_mib()
    if taken is not None:
        return ProcessMemory("VRAM", taken)
    return ProcessMemory("PSS", sum(_kibibytes(process, "Pss") for process in family(pid)) / 2**10)


def family(pid: int) -> list[int]:
    """Return the process and its descendants, itself first. Who ends meanwhile may be among them or not."""
    found, tasks, children = [pid], list[Path](), list[str]()
    with suppress(*_GONE):
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    for task in tasks:
        # One by one: a thread that ends must not hide the others' children.
        with suppress(*_GONE):
            children += (task / "children").read_text().split()
    for child in children:
        found += family(int(child))
    return found


def vram_mib() -> float | None:
    """Return what is in use on the GPU, None without CUDA. Raises CalledProcessError if nvidia-smi fails."""
    return _device_mib() if torch.cuda.is_available() else None


def _kibibytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise ValueError(f"/proc/{pid}/smaps_rollup has no {name}")


def _device_mib() -> float:
    """Return what is taken of the GPU that is used, by whomever: in a container the driver's process ids are others."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={gpu}"]
    return float(subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout)
