"""The processor time of a server's processes.

On a machine with few cores it tells what a ratio of throughputs can't: whether the engine waits for another process, or
another process takes its core.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
from triton_supervisor.process_table import model_processes

MODEL = "the model's process"


@dataclass(frozen=True)
class ServerProcesses:
    """tritonserver and the model's processes: its children, the Python backend's stubs."""

    triton: int
    models: tuple[int, ...]

    @classmethod
    def of(cls, triton: int) -> ServerProcesses:
        """Find the stubs of a tritonserver. Raises RuntimeError if there are none."""
        models = tuple(sorted(process.pid for process in model_processes(triton)))
        if not models:
            raise RuntimeError(f"process {triton} has no model's process among its children")
        return cls(triton, models)

    def seconds(self) -> dict[str, float]:
        """Return each one's processor seconds so far."""
        return {MODEL: sum(map(_seconds, self.models)), "tritonserver": _seconds(self.triton)}


def _seconds(process: int) -> float:
    times = psutil.Process(process).cpu_times()
    return float(times.user + times.system)
