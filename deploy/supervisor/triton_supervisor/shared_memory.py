"""A server's files in /dev/shm: found by the prefix of their names, and removed once the server is gone.

- They are the Python backend's regions, request counts (answers.py), and cancellations between models.
- A container finds its own by its host name. Elsewhere a prefix is random, so its owner holds a lock: the kernel
  releases it when the owner dies, in any way and in any container that shares /dev/shm, and a later start removes what
  is left.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import socket
import stat
from collections.abc import Callable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")

CANCELLATIONS = "TRITON_LLAMA_CANCELLATIONS"
"""Environment variable for the models: the beginning of their cancellations' paths."""

_LOCK = "triton_llama_owner_of_"
"""The beginning of a lock's name, and no region's; the prefix follows."""
_PREFIX = re.compile(r"triton_python_backend_shm_region_[A-Za-z0-9-]+_")


def prefix_for(owner: str) -> str:
    """Return the prefix of the names of shared memory regions that belong to `owner`."""
    return f"triton_python_backend_shm_region_{owner}_"


def container_prefix() -> str:
    """Return this container's prefix, the same at every start: /dev/shm, and the regions in it, may outlive one.

    The host name is the container's or the pod's: others that share /dev/shm keep their regions.
    """
    return prefix_for(re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname()))


def prefix_argument(prefix: str) -> str:
    """Return tritonserver's option that makes the Python backend use the prefix."""
    return f"--backend-config=python,shm-region-prefix-name={prefix}"


def cancellations_environment(prefix: str) -> dict[str, str]:
    """Return the setting that gives the files of cancelled requests the prefix."""
    return {CANCELLATIONS: f"{SHARED_MEMORY}/{prefix}cancelled-"}


def remove_shared_memory(prefix: str) -> None:
    """Remove the files whose names begin with the prefix; another user's, or a folder, stays."""
    for region in SHARED_MEMORY.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(PermissionError, IsADirectoryError):
            region.unlink(missing_ok=True)


class Ownership:
    """Owns the files with a prefix, by a lock, for as long as this process runs. Raises OSError without /dev/shm."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._file = SHARED_MEMORY / f"{_LOCK}{prefix}"
        while True:
            # Not inheritable: the lock is this process's alone.
            self._lock = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.fstat(self._lock).st_nlink:
                return
            # `remove_orphaned` of another process had it first.
            os.close(self._lock)

    def release(self) -> None:
        """Remove the files and give the prefix up."""
        remove_shared_memory(self._prefix)
        self._file.unlink(missing_ok=True)
        os.close(self._lock)


def remove_orphaned(say: Callable[[str], None]) -> None:
    """Remove the files of this user's owners that are gone. say: takes a line about each."""
    for file in SHARED_MEMORY.glob(f"{_LOCK}*"):
        prefix = file.name.removeprefix(_LOCK)
        # It may be gone, or going.
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            found = file.lstat()
            if not (_PREFIX.fullmatch(prefix) and stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()):
                continue
            lock = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                say(f"the server of {prefix} was killed with its guard: removing what it has left in {SHARED_MEMORY}")
                remove_shared_memory(prefix)
                file.unlink(missing_ok=True)
            finally:
                os.close(lock)
