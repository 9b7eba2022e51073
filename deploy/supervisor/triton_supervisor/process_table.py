"""The machine's processes, as /proc shows them: what one is, and whose children there are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")

# What follows the name in /proc/PID/stat, by proc(5)'s numbering less three.
_STATE, _PARENT, _START_TIME = 0, 1, 19
_ENDED = ("Z", "X")


@dataclass(frozen=True)
class Process:
    """One process. name: its first 15 characters. started: in clock ticks since boot. ended: but not collected yet."""

    pid: int
    name: str
    parent: int
    started: str
    ended: bool


def read_process(pid: int) -> Process | None:
    """Return what the kernel knows of it; None if it is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # "pid (name) state ppid ...", and a name may hold spaces and parentheses.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return Process(pid, head.partition("(")[2], int(fields[_PARENT]), fields[_START_TIME], fields[_STATE] in _ENDED)


def children(parent: int) -> list[Process]:
    """Return the children that a process has now, ended ones too."""
    processes = (read_process(int(folder.name)) for folder in _PROC.glob("[0-9]*"))
    return [process for process in processes if process is not None and process.parent == parent]
