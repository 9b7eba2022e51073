"""A folder that is made by one process and kept, as a cache of what is downloaded or built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock


def made_once(folder: Path, make: Callable[[Path], Path]) -> Path:
    """Return `folder`, made by one process: `make` works in an empty folder and returns the complete one in it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as temporary:
                make(Path(temporary)).rename(folder)
    return folder
