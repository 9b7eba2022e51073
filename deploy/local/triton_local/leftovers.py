"""What a Triton that didn't end in order leaves on the machine, and which of it is ours to remove.

Shared memory regions carry a prefix that the launcher made unique; `triton_supervisor.shared_memory` removes them. The
Python backend's `/tmp/python_env_*` folder carries no mark, and another Triton that is running may need one that
looks the same, so ours is recognised while its server starts. Standard library only: the guard runs this without
site-packages.
"""

import contextlib
import os
import time
from pathlib import Path

from triton_supervisor.process import SHARED_MEMORY

# The backend's environment manager makes its folder here and nowhere else.
ENVIRONMENT_FOLDERS = Path("/tmp")

_BACKEND_LIBRARY = "libtriton_python.so"


class EnvironmentFolder:
    """The one `python_env_*` folder of the server that is about to start.

    It exists by the time the server's first shared memory region does. If a single folder was made between this
    object and that moment, it is ours; if several were (another Triton started within the same half second), it is
    left open which, and they are removed only when no Triton is running that could need one.
    """

    def __init__(self, shm_prefix: str) -> None:
        self._shm_prefix = shm_prefix
        self._since = time.time()
        self._ours: Path | None = None
        self._looked = False

    def look(self) -> None:
        """Recognise it; to be called often while the server starts, costs next to nothing afterwards."""
        if not self._looked and any(SHARED_MEMORY.glob(f"{self._shm_prefix}*")):
            self._looked = True
            candidates = self._candidates()
            self._ours = candidates[0] if len(candidates) == 1 else None

    def remove(self) -> None:
        """Remove it where the server didn't; to be called once the server is gone."""
        if self._ours is not None:
            folders = [self._ours]
        elif not _a_python_backend_runs():
            folders = self._candidates()
        else:
            folders = []
        for folder in folders:
            with contextlib.suppress(OSError):  # removed by the server itself, or not empty and so not a leftover
                folder.rmdir()

    def _candidates(self) -> list[Path]:
        found = []
        for folder in ENVIRONMENT_FOLDERS.glob("python_env_??????"):
            with contextlib.suppress(FileNotFoundError):  # another server has just removed its own
                facts = folder.lstat()
                if facts.st_uid == os.getuid() and facts.st_ctime >= self._since:
                    found.append(folder)
        return found


def _a_python_backend_runs() -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        # Gone meanwhile, or another user's, whose folders the owner check leaves alone.
        with contextlib.suppress(OSError):
            if _BACKEND_LIBRARY in maps.read_text(errors="replace"):
                return True
    return False
