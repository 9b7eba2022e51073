"""What a result was measured on and with."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]

_PACKAGES = ("torch", "transformers", "bitsandbytes", "nvidia-pytriton", "tritonclient", "locust", "fastapi")


def describe() -> dict[str, object]:
    """Return commit, device, cores and versions, for a result's JSON."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    return {
        "commit": commit,
        "uncommitted_changes": bool(changed.strip()),
        "device": device(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
    }


def device() -> str:
    """Return what computes: the GPU's name, or "CPU: " and the processor's."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return "CPU: " + line.split(":", 1)[1].strip()
    return "CPU: " + platform.machine()
