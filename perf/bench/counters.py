"""The server's counters during a measurement, read four times a second, and their growth between two moments.

The steady-state window is known only afterwards, so the counters are read throughout and interpolated. The model
updates its own five times a second: at both ends of a window they are equally late.
"""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

INTERVAL_S = 0.25
NAMES = (
    "llama_generated_tokens_total",
    "llama_step_rows_sum",
    "llama_step_rows_count",
    "nv_inference_count",
    "nv_inference_exec_count",
)
_LINE = re.compile(rf"^({'|'.join(NAMES)})(?:\{{.*\}})? (\S+)$", re.MULTILINE)
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Samples:
    """Readings in their order: a moment in seconds since 1970, and the counters then."""

    readings: list[tuple[float, Mapping[str, float]]]

    def growth(self, name: str, begin: float, end: float) -> float:
        """Return the growth of a counter between two moments, in seconds since 1970."""
        return self.value_at(name, end) - self.value_at(name, begin)

    def value_at(self, name: str, moment: float) -> float:
        """Return a counter's value at a moment, interpolated between two readings.

        Raises ValueError for a moment before the first reading or after the last one.
        """
        first, last = self.readings[0][0], self.readings[-1][0]
        if not first <= moment <= last:
            raise ValueError(f"{name} was read from {first} to {last}, not at {moment}")
        after = min(bisect_right(self.readings, moment, key=lambda reading: reading[0]), len(self.readings) - 1)
        (left, before), (right, then) = self.readings[after - 1], self.readings[after]
        share = (moment - left) / (right - left) if right > left else 1.0
        return before[name] + share * (then[name] - before[name])


@contextmanager
def sampled(metrics_url: str) -> Iterator[Samples]:
    """Read the counters of the metrics service at host:port throughout the block; raise what a reading raised."""
    samples, ended = Samples([_read(metrics_url)]), threading.Event()

    def read_until_ended() -> None:
        while not ended.wait(INTERVAL_S):
            samples.readings.append(_read(metrics_url))

    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read_until_ended)
        try:
            yield samples
        finally:
            ended.set()
    reading.result()
    samples.readings.append(_read(metrics_url))


def _read(metrics_url: str) -> tuple[float, Mapping[str, float]]:
    """Return the moment and the counters, summed over their labels."""
    before = time.time()
    with urllib.request.urlopen(f"http://{metrics_url}/metrics", timeout=_TIMEOUT_S) as response:
        text = response.read().decode()
    counters: dict[str, float] = {}
    for name, value in _LINE.findall(text):
        counters[name] = counters.get(name, 0.0) + float(value)
    return (before + time.time()) / 2, counters
