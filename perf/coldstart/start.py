"""One cold start: the checkpoint's files aren't in memory, the server starts, and is stopped when it is ready.

What a start does besides, importing PyTorch above all, is the same for every checkpoint; so the time that the model's
process takes for the checkpoint itself is taken too, from its lines in the log. The libraries stay in the page cache.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from triton_local.server import LocalTriton
from triton_local.supervised import Supervised

from perf.environment import family
from perf.servers.triton import Loaded

_READY_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Start:
    """One start. ready_s: until the server is ready. load_s: of it, from reading the settings to the weights in place.

    peak_mib: the most that the model's process had in memory until then, pages of files included. loaded: what the
    model says it has loaded.
    """

    ready_s: float
    load_s: float
    peak_mib: float
    loaded: str


class _Moments:
    """When the model said that it begins to load, and that it has loaded."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def take(self, line: str) -> None:
        """Look at a line of the log as it comes."""
        for beginning in ("settings: ", "loaded "):
            if f"llama: {beginning}" in line:
                self._seen[beginning] = time.monotonic()

    @property
    def load_s(self) -> float:
        """Seconds between the two."""
        return self._seen["loaded "] - self._seen["settings: "]


def start(checkpoint: Path, threads: int) -> Start:
    """Start a server of the product with this checkpoint, and stop it. Raises LauncherError if it doesn't get ready."""
    _forget(checkpoint)
    moments = _Moments()
    server = LocalTriton(
        model=str(checkpoint),
        environment={"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
        ready_timeout=_READY_TIMEOUT_S,
        on_log_line=moments.take,
        # Nobody may ask a model that has just started.
        supervised=Supervised(stuck_after=None),
    )
    began = time.monotonic()
    with server:
        ready = time.monotonic() - began
        peak = max(_peak_mib(pid) for pid in family(server.pid))
        return Start(ready, moments.load_s, peak, Loaded.of(server.log_text()).line)


def _forget(folder: Path) -> None:
    """Take the folder's files out of the page cache, as after a restart of the machine."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            # What isn't written to the disk yet would stay.
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _peak_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 2**10
    # The kernel says nothing of a process that has just ended.
    return 0.0
