"""Hardware and software of the machine. Changes none of the device's settings."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sysconfig
from importlib.metadata import distributions

import torch

from perf.course import reason

PACKAGES = ("tokenizers", "accelerate", "numpy", "triton", "safetensors", "pytest", "pytest-asyncio", "pytest-timeout")
"""Beside those that stand in every result."""
TOOLS = ("nvcc", "cc", "ncu", "compute-sanitizer", "cuobjdump", "git", "make", "uv", "perf_analyzer", "tritonserver")
_QUERY = "name,driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit"


def describe(device: torch.device) -> dict[str, object]:
    """Return the environment; what can't be found out has its error instead."""
    found: dict[str, object] = {
        "system": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        "packages": {name: one.version for name in PACKAGES for one in distributions(name=name)},
        "tools": [name for name in TOOLS if shutil.which(name)],
    }
    for name, look in {"libpython": _libpython, "gpu": _gpu, "nvidia_smi": _nvidia_smi}.items():
        try:
            found[name] = look(device)
        except Exception as error:  # noqa: BLE001 - a missing or broken component is a finding
            found[name] = f"failed: {reason(error)}"
    return {**found, "in_short": f"gpu: {found['gpu']}"}


def _gpu(device: torch.device) -> dict[str, object]:
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "cache_mib": round(properties.L2_cache_size / 2**20, 1),
        "memory_mib": round(total / 2**20),
        "free_mib": round(free / 2**20),
        "cuda": torch.version.cuda,
    }


def _nvidia_smi(_: torch.device) -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    return dict(zip(_QUERY.split(","), printed.strip().splitlines()[0].split(", "), strict=True))


def _libpython(_: torch.device) -> str:
    name = f"libpython{sysconfig.get_python_version()}.so.1.0"
    # Triton's Python backend links it; a distribution's Python often lacks it.
    ctypes.CDLL(name)
    return f"{name} can be loaded"
