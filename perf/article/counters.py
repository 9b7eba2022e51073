"""The server's counters during a measurement, read four times a second, and their growth between two moments.

The steady-state window is known only afterwards, so the counters are read throughout and interpolated. The model
updates its own five times a second: at both ends of a window they are equally late.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Mapping
from types import TracebackType

from perf import metrics

INTERVAL_S = 0.25
NAMES = (
    "llama_generated_tokens_total",
    "llama_step_rows_sum",
    "llama_step_rows_count",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_queue_duration_us",
)

Sample = tuple[float, Mapping[str, float]]
"""A moment in seconds since 1970, and the counters then."""


class Sampling:
    """Reads the counters of a server during its block; on leaving raises what a reading raised."""

    def __init__(self, metrics_url: str) -> None:
        """metrics_url: host:port of the metrics service."""
        self._url = metrics_url
        self._samples: list[Sample] = []
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._read_until_ended, name="counters", daemon=True)

    def __enter__(self) -> Sampling:
        self._samples.append(read(self._url))
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        if error is None:
            if self._failure is not None:
                raise self._failure
            self._samples.append(read(self._url))

    @property
    def first(self) -> float:
        """The moment of the first reading, in seconds since 1970."""
        return self._samples[0][0]

    @property
    def last(self) -> float:
        """The moment of the last reading, in seconds since 1970."""
        return self._samples[-1][0]

    def growth(self, name: str, begin: float, end: float) -> float:
        """Return the growth of a counter between two moments, in seconds since 1970."""
        return value_at(self._samples, name, end) - value_at(self._samples, name, begin)

    def _read_until_ended(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            try:
                self._samples.append(read(self._url))
            except Exception as failure:  # noqa: BLE001 - raised again in the measuring thread
                self._failure = failure
                return


def read(metrics_url: str) -> Sample:
    """Read the counters at host:port once. Raises KeyError where one is missing."""
    before = time.time()
    found = metrics.read(metrics_url)
    return (before + time.time()) / 2, {name: found[name] for name in NAMES}


def value_at(samples: list[Sample], name: str, moment: float) -> float:
    """Return a counter's value at a moment, interpolated between two readings.

    Raises ValueError for a moment before the first reading or after the last one.
    """
    if not samples[0][0] <= moment <= samples[-1][0]:
        raise ValueError(f"{name} was read from {samples[0][0]} to {samples[-1][0]}, not at {moment}")
    after = min(bisect_right(samples, moment, key=lambda sample: sample[0]), len(samples) - 1)
    (left, before), (right, then) = samples[after - 1], samples[after]
    share = (moment - left) / (right - left) if right > left else 1.0
    return before[name] + share * (then[name] - before[name])
