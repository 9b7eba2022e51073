"""A contestant under a load: the measurement that goes into a result's file.

    with opened(contestant, checkpoint, threads=1) as server:      # starts it once, for several loads
        server.measure("equal", Closed(32), count=64, warmup=32, slo=None, rates=rates)

Knows one contestant and one load at a time. What becomes of one that can't run is for the run to say (`bench.rivals`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import LlamaConfig

from perf import workload
from perf.environment import memory_of
from perf.load.arrivals import Closed, Poisson
from perf.load.driver import drive
from perf.load.protocols import Request
from perf.load.records import Run
from perf.load.summary import SLO, describe, summarize
from perf.peers.contestant import Contestant, NotRunError, Started
from perf.roofline.physics import Limit, best
from perf.roofline.rates import DeviceRates

Measurement = dict[str, object]
TIMEOUT_S = 900.0
"""For all requests of one load together, if nothing else is said."""


@dataclass(frozen=True)
class Server:
    """A contestant that runs."""

    contestant: Contestant
    started: Started
    checkpoint: Path

    def measure(
        self,
        mix: workload.Mix,
        arrivals: Closed | Poisson,
        count: int,
        warmup: int,
        slo: SLO | None,
        rates: DeviceRates | None,
        timeout: float = TIMEOUT_S,
        mean: int = workload.MEAN_OUTPUT,
    ) -> Measurement:
        """Put it under this load once; `count` requests are measured, after `warmup` of the same mix.

        timeout: seconds for all of them. What isn't answered by then is an error in the measurement, and the server may
        still be at work on it: no other load should follow. mean: output tokens.
        """
        # The mix again for the warm-up: of a part of a mix, the mean would be another one.
        warm = workload.requests(self.checkpoint, mix, warmup, mean) if warmup else []
        asked = workload.requests(self.checkpoint, mix, count, mean)
        run = drive(self.started.target, [*warm, *asked], arrivals, warmup, timeout)
        summary = summarize(run, slo)
        measurement: Measurement = {
            **self.contestant.to_json(),
            "generator": "locust",
            "settings": dict(self.started.settings),
            "command": self.started.command,
            "load": describe(mix, arrivals, count, warmup, _prompt_tokens(run), _mean_tokens(asked)),
            **summary,
            **self._memory(),
        }
        rate = summary.get("tokens_per_second")
        if rates is not None and isinstance(arrivals, Closed) and isinstance(rate, float):
            measurement["limit"] = self._limit(rates, arrivals.concurrency, asked).beside(rate)
        return measurement

    def wave_seconds(self, concurrency: int, mean: int, timeout: float) -> float:
        """Return how long it takes for so many requests of `mean` tokens each, sent at once.

        Raises NotRunError if one of them isn't answered as asked.
        """
        asked = workload.requests(self.checkpoint, "equal", concurrency, mean)
        run = drive(self.started.target, asked, Closed(concurrency), 0, timeout)
        if failed := [record.error for record in run if record.error]:
            raise NotRunError(f"{len(failed)} of its first {concurrency} requests failed: {failed[0]}")
        return run.whole.seconds

    def _memory(self) -> Measurement:
        try:
            taken = memory_of(self.started.pid)
        except (FileNotFoundError, ProcessLookupError):
            # It has ended; the requests that it didn't answer are in the measurement as errors.
            return {}
        weights_mib = round(self.started.weights_mib, 1)
        return {"memory": {"kind": taken.kind, "weights_mib": weights_mib, "process_mib": round(taken.mib, 1)}}

    def _limit(self, rates: DeviceRates, rows: int, asked: list[Request]) -> Limit:
        """Return what the device allows for this load in these weights, whoever serves it: all that is asked at once
        may share a step, and always as many are asked. An open loop has no such limit: it gets what it sends.
        """
        config = LlamaConfig.from_pretrained(self.checkpoint)
        lengths = [request.output_tokens for request in asked]
        return best(config, self.contestant.weights, rates, rows, lengths, workload.PROMPT_TOKENS, steady=True)


@contextmanager
def opened(contestant: Contestant, checkpoint: Path, threads: int) -> Iterator[Server]:
    """Start the contestant for the block. Raises NotRunError if it can't run here."""
    with contestant.start(checkpoint, threads) as started:
        yield Server(contestant, started, checkpoint)


def _mean_tokens(asked: list[Request]) -> float:
    return round(sum(request.output_tokens for request in asked) / len(asked), 2)


def _prompt_tokens(run: Run) -> int:
    """Return the mean length of the prompts as the server counted them; as they were made, where it doesn't count."""
    counted = [record.prompt_tokens for record in run if record.prompt_tokens is not None]
    return round(sum(counted) / len(counted)) if counted else workload.PROMPT_TOKENS
