"""A benchmark's command line: types for argparse, the command that repeats a run, and the time it has."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import time
from pathlib import Path

CORES = len(os.sched_getaffinity(0))


def positive(text: str) -> float:
    """Parse a number > 0; a type for argparse."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is out of bounds: more than 0")
    return value


def count(text: str) -> int:
    """Parse an integer >= 1; a type for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is out of bounds: at least 1")
    return value


def existing_checkpoint(text: str) -> Path:
    """Parse the folder of a checkpoint; a type for argparse."""
    if not (Path(text) / "config.json").is_file():
        raise argparse.ArgumentTypeError(
            f"{text} is not a folder with a config.json (download a checkpoint of the hub first)"
        )
    return Path(text)


def make_command(target: str) -> str:
    """Return the `make` command that repeats this run, without folders of this machine: make bench 'BENCH=--only …'."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    options = [f"{target.rpartition('-')[2].upper()}={shlex.join(words)}"] if words else []
    return shlex.join(["make", target, *options])


class Budget:
    """A run's seconds, counted from when this is created."""

    def __init__(self, minutes: float) -> None:
        self._began = time.monotonic()
        self._seconds = 60 * minutes

    @property
    def left(self) -> float:
        """Seconds until the end, at least 0."""
        return max(0.0, self._began + self._seconds - time.monotonic())

    def say(self, message: str) -> None:
        """Print a line of progress with the time spent and the budget."""
        spent = (time.monotonic() - self._began) / 60
        print(f"[{spent:4.1f} of {self._seconds / 60:.0f} min] {message}", flush=True)
