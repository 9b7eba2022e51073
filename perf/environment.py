"""The benchmark environment: code, device and versions of a run, steal time, and the memory a server takes."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]

_PACKAGES = ("torch", "transformers", "bitsandbytes", "nvidia-pytriton", "tritonclient", "aiohttp")

# Written by runs and by `make report`; no figure depends on them.
_WRITTEN = ("perf/results", "README.md", "docs")


def describe() -> dict[str, object]:
    """Return commit, device, cores and versions, for a result's JSON."""
    changed = _git("status", "--porcelain", "--", ".", *(f":(exclude){path}" for path in _WRITTEN))
    return {
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "uncommitted_changes": changed != "",
        "device": device(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "versions": {name: package.version for name in _PACKAGES for package in distributions(name=name)},
    }


def device() -> str:
    """Return the GPU's name, or "CPU: " and the processor's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"CPU: {name[1].strip() if name else platform.machine()}"


class StealTime:
    """The share of processor time that a virtual machine's host gave to others, from when this is created.

    On such a machine a figure means little without it. 0 on bare metal and where the system does not report it.
    """

    def __init__(self) -> None:
        self._before = psutil.cpu_times()

    def share(self) -> float:
        """Return steal time as a share of the time of all processors."""
        now = psutil.cpu_times()
        passed = sum(now) - sum(self._before)
        return (getattr(now, "steal", 0.0) - getattr(self._before, "steal", 0.0)) / passed if passed > 0 else 0.0


def memory_of(pid: int) -> tuple[str, float]:
    """Return the kind of memory and the MiB in use: with a GPU all VRAM in use on it, whatever the process; else PSS.

    PSS: the proportional set size of the process's family, in which shared pages count once. Raises
    psutil.NoSuchProcess.
    """
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return "VRAM", (total - free) / 2**20
    return "PSS", sum(pss_mib(process) for process in family(pid))


def family(pid: int) -> list[psutil.Process]:
    """Return the process and its descendants, itself first. Raises psutil.NoSuchProcess."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def pss_mib(process: psutil.Process) -> float:
    """Return a process's proportional set size; 0 if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return float(process.memory_full_info().pss) / 2**20
    return 0.0


def _git(*arguments: str) -> str | None:
    """Return what git prints; None without git or a repository."""
    try:
        run = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()
