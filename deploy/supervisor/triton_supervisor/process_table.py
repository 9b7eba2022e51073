"""The machine's processes from /proc, and among them the processes that a Python model runs in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NAME = "triton_python_b"
"""triton_python_backend_stub; the kernel keeps 15 characters of a name."""

_PROC = Path("/proc")

# Fields after the name in /proc/PID/stat, by proc(5)'s numbering less three.
_STATE, _PARENT, _START_TIME = 0, 1, 19
_ENDED = ("Z", "X")


@dataclass(frozen=True)
class Process:
    """One process. name: its first 15 characters. started: in clock ticks since boot. ended: a zombie."""

    pid: int
    name: str
    parent: int
    started: str
    ended: bool


@dataclass(frozen=True)
class ModelProcess:
    """A model process; `started` (clock ticks since boot) tells it from a later process with its pid."""

    pid: int
    started: str

    def runs(self) -> bool:
        """Return whether it still exists, even stopped, stuck, or with another parent."""
        process = read_process(self.pid)
        return process is not None and process.started == self.started and not process.ended


def read_process(pid: int) -> Process | None:
    """Return a process; None if it is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # "pid (name) state ppid ...", where the name may contain spaces and parentheses.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return Process(pid, head.partition("(")[2], int(fields[_PARENT]), fields[_START_TIME], fields[_STATE] in _ENDED)


def children(parent: int) -> list[Process]:
    """Return the children of a process, zombies included."""
    processes = (read_process(int(folder.name)) for folder in _PROC.glob("[0-9]*"))
    return [process for process in processes if process is not None and process.parent == parent]


def model_processes(server: int) -> frozenset[ModelProcess]:
    """Return the model processes of tritonserver `server`: its children, one for each instance of the model.

    Triton 2.51 neither notices that one is gone nor starts it again. A model that is loading may not have its own yet.
    """
    return frozenset(
        ModelProcess(process.pid, process.started)
        for process in children(server)
        if process.name == NAME and not process.ended
    )
