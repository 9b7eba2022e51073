"""Where the result is kept, and where it comes into being: beside each other, so that finishing is a rename.

OUT            the finished checkpoint, whole or not there
OUT.part       the one that is being made; what a killed run leaves of it is thrown away by the next
OUT.replaced   the one before, while another takes its place
OUT.lock       held by the run that works here
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llama_engine.model.manifest import MANIFEST, Manifest

from triton_prepare.errors import PlaceError
from triton_prepare.lock import locked
from triton_prepare.progress import say, size

_MARGIN = 64 << 20
"""Room for what isn't weights: the tokenizer and the file system's own."""


class Places:
    """The folders and the lock of one result. Raises PlaceError for whatever can't be done with them."""

    def __init__(self, out: Path) -> None:
        # Without links in it: the rename must stay on one volume.
        self.out = out.expanduser().resolve()
        self.part = self.out.with_name(f"{self.out.name}.part")
        self._replaced = self.out.with_name(f"{self.out.name}.replaced")
        self._lock = self.out.with_name(f"{self.out.name}.lock")

    def finished(self) -> Manifest | None:
        """Return the manifest of the checkpoint that is there, None if there is none.

        Raises PlaceError if something else is there, CheckpointError for a manifest that can't be read.
        """
        manifest = Manifest.read(self.out)
        if manifest is None and self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise PlaceError(f"{self.out} is there and was not prepared by this program: name another folder")
        return manifest

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Be the only run that works here while the block runs; wait for another one to end."""
        if self.out.is_mount():
            raise PlaceError(f"{self.out} is a mount point, which nothing can be renamed to: name a folder below it")
        with self._explained():
            self.out.parent.mkdir(parents=True, exist_ok=True)
        with locked(self._lock, lambda: say(f"another run is preparing {self.out}: waiting for it to end")):
            with self._explained():
                if self._replaced.exists() and not self.out.exists():
                    # A run was killed between its two last steps.
                    self._replaced.rename(self.out)
            yield

    def check_room(self, needed: int) -> None:
        """Raise PlaceError unless the volume has room for so many bytes."""
        check_room(self.out.parent, needed + _MARGIN, str(self.out))

    def begin(self) -> None:
        """Make the folder that is worked in, empty, and remove what killed runs have left."""
        with self._explained():
            for left in (self.part, self._replaced):
                if left.exists():
                    shutil.rmtree(left)
            self.part.mkdir()

    def finish(self) -> None:
        """Put the folder that was worked in, manifest and all, into its place: on the disk and not only in memory."""
        with self._explained():
            # safetensors writes what nobody else may read, and a server may be another user.
            mode = (self.part / MANIFEST).stat().st_mode
            for path in self.part.iterdir():
                path.chmod(mode)
                _flush(path)
            _flush(self.part)
            if self.out.exists():
                self.out.rename(self._replaced)
            self.part.rename(self.out)
            _flush(self.out.parent)
        try:
            if self._replaced.exists():
                shutil.rmtree(self._replaced)
        except OSError as error:
            # The result is in its place all the same.
            say(f"{self._replaced} can't be removed: {error.strerror}; delete it by hand")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise PlaceError(f"{error.filename or self.out} can't be written: {error.strerror}") from error


def check_room(folder: Path, needed: int, what: str) -> None:
    """Raise PlaceError unless the volume of a folder, which may be there or not, has room for so many bytes."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PlaceError(f"{what} needs {size(needed)}, and the volume of {folder} has {size(free)} left")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
