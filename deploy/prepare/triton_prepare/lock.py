"""One run at a time: a lock that ends with the process that holds it, however that ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from triton_prepare.errors import PlaceError


@contextmanager
def locked(file: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a file, made if need be and never removed, while the block runs.

    waiting: is called once if somebody else holds it. Raises PlaceError where there can be no lock.
    """
    try:
        # Of the kind that network file systems have as well: those want the file open for writing.
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise PlaceError(f"{file} can't be written: {error.strerror}") from error
    try:
        _lock(descriptor, file, waiting)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, file: Path, waiting: Callable[[], None]) -> None:
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        raise PlaceError(f"{file} can't be locked: {error.strerror}") from error
