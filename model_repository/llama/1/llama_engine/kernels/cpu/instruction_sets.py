"""The instruction sets of the CPU kernels: which ones a processor has and the environment allows, and the fastest one.

The environment's variables are torch's: ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from pathlib import Path

from llama_engine.errors import one_line
from llama_engine.kernels.cpu.bindings import CpuKernels
from llama_engine.kernels.cpu.build import BUILD_DIRECTORY, SCRIPT, object_path
from llama_engine.kernels.cpu.self_test import self_test

_AVX2 = frozenset({"avx2", "fma"})
_AVX512_VNNI = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}

CPU_FLAGS = {
    "avx512-amx": _AVX512_VNNI | {"avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"},
    "avx512-bf16": _AVX512_VNNI | {"avx512_bf16"},
    "avx512-vnni": _AVX512_VNNI,
    "avx2": _AVX2,
}
"""The flags in /proc/cpuinfo that each instruction set requires, the fastest first."""

INSTRUCTION_SETS = tuple(CPU_FLAGS)

FALLBACK_EFFECT = "INT8 weights are dequantized: steps are slower and not batch-invariant"
"""Effect of missing compiled kernels, for the log."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18

_log = logging.getLogger(__name__)


def choose_cpu_kernels(directory: Path = BUILD_DIRECTORY) -> CpuKernels | None:
    """Return the kernels of the fastest instruction set that is allowed, compiled and correct on this CPU.

    If it isn't the fastest allowed one, or if there is none, one warning says why.
    """
    reasons = []
    for name in allowed_instruction_sets():
        try:
            kernels = load_kernels(name, object_path(name, directory))
        except RuntimeError as error:
            reasons.append(f"{name}: {error}")
            continue
        if reasons:
            _log.warning("the CPU kernels are those of %s (%s)", name, "; ".join(reasons))
        return kernels
    if reasons:
        _log.warning("no CPU kernels (%s); install a C++ compiler (Debian's package g++) and run python3 %s. %s",
                     "; ".join(reasons), SCRIPT, FALLBACK_EFFECT)  # fmt: skip
    else:
        _log.warning("no CPU kernels (they need AVX2 and FMA, and ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA must "
                     "allow them). %s", FALLBACK_EFFECT)  # fmt: skip
    return None


def load_kernels(name: str, path: Path) -> CpuKernels:
    """Load an instruction set's object. Raises RuntimeError if it doesn't exist or fails the self-test."""
    if not path.exists():
        raise RuntimeError("not compiled")
    try:
        if name == "avx512-amx":
            request_amx()
        kernels = CpuKernels(name, path)
        self_test(kernels)
    except (OSError, AttributeError, RuntimeError, ValueError) as error:
        raise RuntimeError(one_line(error)) from error
    return kernels


def allowed_instruction_sets() -> list[str]:
    """Return the instruction sets that the CPU has and the environment allows, the fastest first."""
    flags = cpu_flags()
    capped = min(_onednn_cap(), _aten_cap())
    return [name for name in INSTRUCTION_SETS[len(INSTRUCTION_SETS) - capped :] if flags >= CPU_FLAGS[name]]


def runnable_instruction_sets() -> list[str]:
    """Return the allowed instruction sets, without AMX where Linux refuses its registers.

    Requests the registers from Linux; the process keeps the permission.
    """
    names = allowed_instruction_sets()
    if "avx512-amx" in names:
        try:
            request_amx()
        except OSError:
            names.remove("avx512-amx")
    return names


def cpu_flags() -> set[str]:
    """Return the flags of the first CPU in /proc/cpuinfo."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    return set()


def _onednn_cap() -> int:
    """Return how many instruction sets, counted from the slowest, ONEDNN_MAX_CPU_ISA allows."""
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "ALL")).upper()
    if cap in ("SSE41", "AVX"):
        return 0
    if cap in ("AVX512_CORE", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"):
        return 1
    if cap == "AVX512_CORE_VNNI":
        return 2
    # These are all other AVX-512 and AVX10 names without AMX. An unknown name is no cap, as in oneDNN.
    return 3 if cap.startswith(("AVX512_CORE_", "AVX10_")) and "AMX" not in cap else 4


def _aten_cap() -> int:
    """Return how many instruction sets, counted from the slowest, ATEN_CPU_CAPABILITY allows."""
    return {"default": 0, "avx2": 1}.get(os.environ.get("ATEN_CPU_CAPABILITY", "").lower(), 4)


def request_amx() -> None:
    """Request permission for AMX's tile registers from Linux. Raises OSError if it is refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) != 0:
        raise OSError(ctypes.get_errno(), "the kernel refuses AMX's tile registers")


def main() -> None:
    """Test an object for `build`, if it can run here: its instruction set and path are the arguments.

    Exits with the reason if it fails.
    """
    name, path = sys.argv[1:]
    if name not in runnable_instruction_sets():
        return
    try:
        load_kernels(name, Path(path))
    except RuntimeError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
