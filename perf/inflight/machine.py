"""What a result was measured on and with."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def describe() -> dict[str, object]:
    """Return commit, device, cores and versions, for a result's JSON."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    return {
        "commit": commit,
        "uncommitted_changes": bool(changed.strip()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "bitsandbytes", "nvidia-pytriton")},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return "CPU: " + line.split(":", 1)[1].strip()
    return "CPU: " + platform.machine()
