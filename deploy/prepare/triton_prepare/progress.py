"""Output: lines, and a progress bar on a terminal."""

import sys
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
    started, hidden = time.monotonic(), not sys.stderr.isatty()
    say(name)
    with tqdm(total=total, desc=name, unit="B", unit_scale=True, leave=False, disable=hidden) as bar:
        yield bar.update
    say(f"{name}: done in {time.monotonic() - started:.1f} s")
