"""The processor time of processes, from /proc.

On a machine with few cores it tells what a ratio of throughputs can't: whether the engine waits for another process, or
another process takes its core.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from triton_supervisor.process_table import model_processes

MODEL = "the model's process"

_TICKS = os.sysconf("SC_CLK_TCK")


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
        return {
            MODEL: sum(_seconds(process) for process in self.models),
            "tritonserver": _seconds(self.triton),
        }


def finished_children_seconds() -> float:
    """Return the processor seconds of this process's children that have ended and been reaped."""
    times = os.times()
    return times.children_user + times.children_system


def _seconds(process: int) -> float:
    # The name in parentheses may contain spaces; user and system ticks are the 14th and 15th field of all.
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
