"""Output: lines, and a progress bar on a terminal."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


class PrepareError(Exception):
    """The checkpoint can't be prepared, stored or verified; `str()` is one line for the user."""


def say(line: str) -> None:
    """Print a line at once."""
    print(f"prepare: {line}", flush=True)


@contextmanager
def stage(name: str, total: int = 0) -> Iterator[Callable[[int], object]]:
    """Show a stage while the block runs, then its duration; yield a function that adds bytes done, out of `total`."""
    started, ended, on_terminal = time.monotonic(), threading.Event(), sys.stderr.isatty()

    def report() -> None:
        while not on_terminal and not ended.wait(15):
            say(f"{name}: {time.monotonic() - started:.0f} s so far")

    say(name)
    threading.Thread(target=report, daemon=True).start()
    try:
        with tqdm(total=total, desc=name, unit="B", unit_scale=True, leave=False, disable=not on_terminal) as bar:
            yield bar.update
    finally:
        ended.set()
    say(f"{name}: done in {time.monotonic() - started:.1f} s")
