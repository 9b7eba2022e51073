"""What a server takes of its machine: memory, file descriptors, threads and shared memory, from /proc, and VRAM.

One look, without a memory of the one before: whether something grows is `trend`'s and `verdict`'s to say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from perf import environment
from perf.overhead.processes import ServerProcesses

_SHARED_MEMORY = Path("/dev/shm")
# The launcher names the Python backend's regions after the start that they belong to.
_REGION = re.compile(r"/dev/shm/(triton_python_backend_shm_region_[0-9a-f]{12}_)")
_BLOCK = 512
_MIB = 1 << 20


@dataclass(frozen=True)
class ProcessVitals:
    """One process. rss_mib: what it has in memory; pss_mib: the same with shared pages shared out among their users."""

    rss_mib: float
    pss_mib: float
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> ProcessVitals:
        """Look at a process. Raises an OSError for one that has ended."""
        process = Path(f"/proc/{pid}")
        memory = (process / "smaps_rollup").read_text()
        status = (process / "status").read_text()
        return cls(
            rss_mib=_number(memory, "Rss") / 1024,
            pss_mib=_number(memory, "Pss") / 1024,
            descriptors=sum(1 for _ in (process / "fd").iterdir()),
            threads=_number(status, "Threads"),
        )


@dataclass(frozen=True)
class ServerVitals:
    """tritonserver and the model's process. shared_memory_mib: of the regions between them, left ones included.

    vram_mib: what is in use on the GPU, by whomever; None without CUDA.
    """

    triton: ProcessVitals
    model: ProcessVitals
    shared_memory_mib: float
    vram_mib: float | None

    @classmethod
    def of(cls, processes: ServerProcesses) -> ServerVitals:
        """Look at a server of one model instance.

        Raises an OSError where a process has ended, RuntimeError for a server of several instances, CalledProcessError
        if nvidia-smi fails.
        """
        if len(processes.models) != 1:
            raise RuntimeError(f"{len(processes.models)} model processes run; one is expected")
        return cls(
            ProcessVitals.of(processes.triton),
            ProcessVitals.of(processes.models[0]),
            _shared_mib(processes.triton),
            environment.vram_mib(),
        )


def _number(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
    if found is None:
        # What /proc has of a process that nobody has waited for yet.
        raise ProcessLookupError(f"the process has no {name}: it has ended")
    return int(found[1])


def _shared_mib(triton: int) -> float:
    prefixes = set(_REGION.findall(Path(f"/proc/{triton}/maps").read_text()))
    taken = 0
    for prefix in prefixes:
        for region in _SHARED_MEMORY.glob(f"{prefix}*"):
            taken += region.stat().st_blocks * _BLOCK
    return taken / _MIB
