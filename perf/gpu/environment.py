"""Hardware and software of this machine, tried out and not only looked up."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch

from perf.course import reason
from perf.gpu.models import in_8_bits

PACKAGES = (
    "torch", "transformers", "tokenizers", "bitsandbytes", "accelerate", "numpy", "triton", "safetensors",
    "tritonclient", "nvidia-pytriton", "pytest", "pytest-asyncio", "pytest-timeout",
)  # fmt: skip
TOOLS = ("nvcc", "cc", "ncu", "compute-sanitizer", "cuobjdump", "git", "make", "uv", "perf_analyzer", "tritonserver")
_QUERY = "name,driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit"


def describe(device: torch.device) -> dict[str, object]:
    """Return the environment; what doesn't work has its error instead. Changes none of the device's settings."""
    found: dict[str, object] = {
        "device": device.type,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        "cores": len(os.sched_getaffinity(0)),
        "packages": {name: _version(name) for name in PACKAGES},
        "tools": {name: shutil.which(name) is not None for name in TOOLS},
        "libpython": _tried(_libpython),
        "bitsandbytes": _tried(_bitsandbytes, device),
    }
    for name, look in (("gpu", _gpu), ("nvidia_smi", _nvidia_smi), ("triton_language", _triton_language)):
        found[name] = _tried(look, device) if device.type == "cuda" else "needs CUDA"
    return {
        **found,
        "in_short": "; ".join(f"{name}: {found[name]}" for name in ("gpu", "bitsandbytes", "triton_language")),
    }


def _tried(look: Callable[..., object], *device: torch.device) -> object:
    try:
        return look(*device)
    except Exception as error:  # noqa: BLE001 - a missing or broken component is a finding
        return f"failed: {reason(error)}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


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


def _bitsandbytes(device: torch.device) -> str:
    weight = torch.randn(64, 128, device=device, dtype=torch.float16)
    rows = torch.randn(3, 128, device=device, dtype=torch.float16)
    exact = rows.double() @ weight.double().T
    products = (in_8_bits(weight, threshold)(rows).double() for threshold in (0.0, 6.0))
    zero, six = (float((product - exact).norm() / exact.norm()) for product in products)
    return f"8-bit products work; relative errors {zero:.3g} at threshold 0, {six:.3g} at 6"


def _triton_language(device: torch.device) -> str:
    began = time.perf_counter()
    module = importlib.import_module("perf.gpu.triton_language")
    if not module.works(device):
        raise RuntimeError("a compiled kernel returned a wrong result")
    return f"a kernel compiles and runs, in {time.perf_counter() - began:.1f} s with the import"


def _libpython() -> str:
    name = f"libpython{sysconfig.get_python_version()}.so.1.0"
    # Triton's Python backend links it; a distribution's Python often lacks it.
    ctypes.CDLL(name)
    return f"{name} can be loaded"
