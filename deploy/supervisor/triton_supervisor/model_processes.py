"""The processes that a Python model runs in: children of tritonserver, one for each instance of the model.

Triton 2.51 never starts one again, and doesn't notice that it is gone. Only the process table is asked, no Triton. A
model that is being loaded may have its process already, or not yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton_supervisor.process_table import children, read_process

NAME = "triton_python_b"
"""triton_python_backend_stub; the kernel keeps 15 characters of a name."""


@dataclass(frozen=True)
class ModelProcess:
    """One process; `started` (clock ticks since boot) tells it from a later one of the same number."""

    pid: int
    started: str

    def runs(self) -> bool:
        """Return whether it is still there, even if it is stopped or stuck. Who its parent is doesn't matter."""
        process = read_process(self.pid)
        return process is not None and process.started == self.started and not process.ended


def model_processes(server: int) -> frozenset[ModelProcess]:
    """Return the model processes that are children of process `server` now."""
    return frozenset(
        ModelProcess(process.pid, process.started)
        for process in children(server)
        if process.name == NAME and not process.ended
    )
