"""How much processor time processes have used, from /proc.

On a machine with few cores this says what a ratio of throughputs can't: whether the engine waits for somebody, or
whether somebody takes its core away.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from triton_supervisor.model_processes import model_processes

MODEL = "the model's process"

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ServerProcesses:
    """tritonserver and the model's processes, the Python backend's stubs, that are its children.

    Raises RuntimeError on making it if there is no such child.
    """

    triton: int
    models: tuple[int, ...]

    @classmethod
    def of(cls, triton: int) -> ServerProcesses:
        """Find the stubs of a tritonserver."""
        models = tuple(sorted(process.pid for process in model_processes(triton)))
        if not models:
            raise RuntimeError(f"process {triton} has no model's process among its children")
        return cls(triton, models)

    def seconds(self) -> dict[str, float]:
        """Return the processor seconds that each has used until now."""
        return {
            MODEL: sum(_seconds(process) for process in self.models),
            "tritonserver": _seconds(self.triton),
        }


def finished_children_seconds() -> float:
    """Return the processor seconds of this process's children that have ended and been waited for."""
    times = os.times()
    return times.children_user + times.children_system


def _seconds(process: int) -> float:
    # The name in parentheses may hold spaces; user and system ticks are the 14th and 15th field of all.
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
