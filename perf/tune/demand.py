"""The load that every point is measured under: which requests, and when they come."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from perf import workload
from perf.load.arrivals import Closed, Poisson
from perf.load.protocols import Request
from perf.load.summary import describe
from perf.workload import Mix


@dataclass(frozen=True)
class Demand:
    """requests: those measured. warmup: so many come before them and aren't. timeout: seconds for all of a point's."""

    mix: Mix
    arrivals: Closed | Poisson
    requests: int
    warmup: int
    output_tokens: int
    timeout: float

    @property
    def most_at_once(self) -> int | None:
        """How many requests can be under way at most; None in an open loop, where it is up to the server."""
        return min(self.arrivals.concurrency, self.requests) if isinstance(self.arrivals, Closed) else None

    def sent(self, checkpoint: Path) -> list[Request]:
        """Return all requests, the warm-up's first.

        The two are made apart: each has all of the mix's lengths, and the measured ones are the same whatever comes
        before.
        """
        warmup = workload.requests(checkpoint, self.mix, self.warmup, self.output_tokens) if self.warmup else []
        return [*warmup, *workload.requests(checkpoint, self.mix, self.requests, self.output_tokens)]

    def described(self) -> dict[str, object]:
        """Return it as a measurement has it."""
        return describe(self.mix, self.arrivals, self.requests, self.warmup, workload.PROMPT_TOKENS, self.output_tokens)

    def in_words(self) -> str:
        """Return it as a part of a sentence."""
        if isinstance(self.arrivals, Closed):
            arrivals = f"{self.arrivals.concurrency} at a time"
        else:
            arrivals = f"{self.arrivals.rate:g} a second at random moments"
        return (
            f"{self.requests} requests of {self.output_tokens} new tokens on average ({self.mix} lengths), {arrivals}"
        )
