"""Showing how far a long stage is: a bar on a terminal, elsewhere (a container's log) a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from tqdm import tqdm

_EVERY_S = 15.0

Progress = Callable[[int], None]
"""Is told how many more bytes were done."""


def say(line: str) -> None:
    """Print a line at once."""
    print(f"prepare: {line}", flush=True)


def on_terminal() -> bool:
    """Return whether bars can be drawn: they go to stderr."""
    return sys.stderr.isatty()


def size(count: float) -> str:
    """Return a number of bytes in a few characters, such as 13.5GB."""
    return tqdm.format_sizeof(count, "B")


@contextmanager
def stage(what: str, total: int = 0) -> Iterator[Progress]:
    """Show a stage while the block runs, and how long it took. total: its bytes; 0 if nobody can tell."""
    began = time.monotonic()
    if on_terminal() and total:
        with tqdm(total=total, desc=f"prepare: {what}", unit="B", unit_scale=True, leave=False) as bar:
            yield partial(_advance, bar)
    else:
        say(f"{what}{f', {size(total)}' if total else ''}")
        lines = _Lines(what, total, began)
        try:
            yield lines.add
        finally:
            lines.end()
    say(f"{what}: done in {time.monotonic() - began:.1f} s")


def _advance(bar: tqdm[NoReturn], count: int) -> None:
    bar.update(count)


class _Lines:
    """A line every few seconds, from a thread of its own: what is waited for may not report anything."""

    def __init__(self, what: str, total: int, began: float) -> None:
        self._what, self._total, self._began = what, total, began
        self._done = 0
        self._ended = threading.Event()
        # On a terminal whoever can't tell how far it is has a bar of its own.
        self._thread = None if on_terminal() else threading.Thread(target=self._run, daemon=True)
        if self._thread is not None:
            self._thread.start()

    def add(self, count: int) -> None:
        """Take note of more bytes."""
        self._done += count

    def end(self) -> None:
        """Say nothing more."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            far = f"{size(self._done)} of {size(self._total)}, " if self._total else ""
            say(f"{self._what}: {far}{time.monotonic() - self._began:.0f} s so far")
