"""The Python backend's regions in /dev/shm: found by the prefix of their names, and removed once the server is gone."""

from __future__ import annotations

import contextlib
import glob
import re
import socket
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


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


def remove_shared_memory(prefix: str) -> None:
    """Remove the regions whose names begin with the prefix; another user's, or a folder, stays."""
    for region in SHARED_MEMORY.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(PermissionError, IsADirectoryError):
            region.unlink(missing_ok=True)
