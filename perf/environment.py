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

_PACKAGES = ("torch", "transformers", "bitsandbytes", "nvidia-pytriton", "tritonclient", "aiohttp", "fastapi")

# Written by runs and by `make report`; no figure depends on them.
_WRITTEN = ("perf/results", "README.md", "docs")


def describe() -> dict[str, object]:
    """Return commit, device, cores and versions, for a result's JSON."""
    return {
        **sources(),
        "device": device(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "versions": {name: found.version for name in _PACKAGES for found in distributions(name=name)},
    }


def sources() -> dict[str, object]:
    """Return what identifies the running code: the commit, and whether files differ from it.

    Documents and results do not count.
    """
    # Git itself would look for a repository in the folders above, too.
    if (ROOT / ".git").exists():
        # No git, or a repository of another user or an incomplete one: the run goes on all the same.
        with suppress(FileNotFoundError, subprocess.CalledProcessError):
            changed = _git("status", "--porcelain", "--", ".", *(f":(exclude){path}" for path in _WRITTEN))
            return {"commit": _git("rev-parse", "HEAD").strip(), "uncommitted_changes": bool(changed)}
    return {"commit": "unknown", "uncommitted_changes": True}


def device() -> str:
    """Return the GPU's name, or "CPU: " and the processor's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    named = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"CPU: {named[1].strip() if named else platform.machine()}"


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
    """Return the memory in use and its kind, in MiB: VRAM where there is a GPU, else the PSS of a process's family.

    PSS: proportional set size, in which shared pages count once. Raises FileNotFoundError or ProcessLookupError for a
    process that has ended, CalledProcessError if nvidia-smi fails.
    """
    if (vram := vram_mib()) is not None:
        return "VRAM", vram
    _, *descendants = family(pid)
    kib = status_kib(pid, "smaps_rollup", "Pss")
    for process in descendants:
        # It may have ended meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError):
            kib += status_kib(process, "smaps_rollup", "Pss")
    return "PSS", kib / 2**10


def family(pid: int) -> list[int]:
    """Return the process and its descendants, itself first. Processes that end meanwhile may be missing."""
    with suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return [pid]


def vram_mib() -> float | None:
    """Return the VRAM in use, None without CUDA. Raises CalledProcessError if nvidia-smi fails.

    Of the whole GPU: inside a container the driver's process ids are different ones.
    """
    if not torch.cuda.is_available():
        return None
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={gpu}"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout)


def status_kib(pid: int, file: str, name: str) -> int:
    """Return a value in KiB from a file in /proc/PID. Raises ValueError if the kernel does not report it."""
    found = re.search(rf"^{name}:\s*(\d+)", Path(f"/proc/{pid}/{file}").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"/proc/{pid}/{file} has no {name}")
    return int(found[1])


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout
