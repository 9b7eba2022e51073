"""What a Triton that didn't end in order leaves in shared memory, recognised by the prefix of its names."""

from __future__ import annotations

import re
import socket
from pathlib import Path

FOLDER = Path("/dev/shm")
_BACKENDS_OWN = "triton_python_backend_shm_region_"


def prefix_for(owner: str) -> str:
    """Return the beginning of the names of regions that belong to `owner` alone."""
    return f"{_BACKENDS_OWN}{owner}_"


def container_prefix() -> str:
    """Return the same prefix at every start of this container: /dev/shm may outlive a start, and so what is left there.

    The host's name is the container's or the pod's, so that another one which shares /dev/shm keeps its regions.
    """
    return prefix_for(re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname()))


def prefix_argument(prefix: str) -> str:
    """Return tritonserver's option that makes the Python backend use this prefix."""
    return f"--backend-config=python,shm-region-prefix-name={prefix}"


def remove_shared_memory(prefix: str) -> None:
    """Remove the regions whose name begins with `prefix`."""
    for region in FOLDER.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)
