"""What a server takes: VRAM where there is a GPU, else the memory of its process and all below it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch


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
    if torch.cuda.is_available():
        return ProcessMemory("VRAM", _device_mib())
    return ProcessMemory("PSS", sum(_kibibytes(process, "Pss") for process in family(pid)) / 2**10)


def family(pid: int) -> list[int]:
    """Return the process and its descendants, itself first."""
    found = [pid]
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in tasks.read_text().split():
            found += family(int(child))
    return found


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
