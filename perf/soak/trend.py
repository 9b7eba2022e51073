"""Whether a figure grows: by Theil and Sen's slope, the median of the slopes between all pairs of points.

It doesn't mind a minority of wild points (a burst, a collection of garbage), which least squares would follow. Its
interval takes the points for independent; neighbouring looks at a process aren't quite, so it is a little too narrow,
and the bounds that it is held against are wide. As little does it mind a jump near the end, which most pairs don't
see: so the levels of the first and the last tenth are compared, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import theilslopes

CONFIDENCE = 0.95
FEWEST_POINTS = 8
MOST_POINTS = 1000
"""Of which all pairs are looked at; of more, every so-manieth."""

_HOUR = 3600.0


@dataclass(frozen=True)
class Trend:
    """level: the median. slope: per hour, with its interval. seconds: from the first point to the last.

    change: from the median of the first tenth of the points to that of the last one.
    """

    level: float
    slope: float
    low: float
    high: float
    seconds: float
    change: float

    @classmethod
    def of(cls, seconds: Sequence[float], values: Sequence[float]) -> Trend:
        """Look at values over time, in seconds. Raises ValueError for fewer than `FEWEST_POINTS`."""
        if len(values) < FEWEST_POINTS:
            raise ValueError(f"{len(values)} points are too few for a trend; {FEWEST_POINTS} at least")
        step = -(-len(values) // MOST_POINTS)
        found = theilslopes(values[::step], seconds[::step], alpha=CONFIDENCE)
        slope, low, high = (float(value) * _HOUR for value in (found.slope, found.low_slope, found.high_slope))
        tenth = max(1, len(values) // 10)
        change = statistics.median(values[-tenth:]) - statistics.median(values[:tenth])
        return cls(statistics.median(values), slope, low, high, seconds[-1] - seconds[0], change)
