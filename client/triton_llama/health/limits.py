"""How long a probe waits, and how old its evidence may be."""

from __future__ import annotations

import math

DEFAULT_TIMEOUT = 20.0
DEFAULT_STEP_AGE = 30.0


class Limits:
    """Seconds. timeout: by when a token must have come. step_age: how old the last step may be to count as evidence.

    A timeout shorter than the longest step (on a CPU, a prompt of a large model can take many seconds to read) calls a
    server dead that is only slow.

    Raises:
        ValueError: one of them isn't a positive number.
    """

    def __init__(self, timeout: float = DEFAULT_TIMEOUT, step_age: float = DEFAULT_STEP_AGE) -> None:
        for name, seconds in (("timeout", timeout), ("step_age", step_age)):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{name} is {seconds}; it must be a positive number of seconds")
        self.timeout = timeout
        self.step_age = step_age
