"""A running server under loads of one generator; each becomes an entry of a result's measurements.

with opened(server, checkpoint, threads=1) as session:      # starts it once, for several loads
    session.measure("equal", Closed(32), count=64, warmup=32, slo=None, rates=rates)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from perf.roofline.physics import roofline
from perf.roofline.rates import DeviceRates
from perf.servers.server import NotRunError, Running, Server

Measurement = dict[str, object]
TIMEOUT_S = 900.0
"""Default for all requests of one load together."""


@dataclass(frozen=True)
class Session:
    """A server that runs with a checkpoint."""

    server: Server
    running: Running
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
        """Apply this load once; `count` requests are measured, after `warmup` of the same mix.

        timeout: seconds for all of them. A request not answered by then is an error in the measurement, and the server
        may still be computing it: no other load should follow. mean: output tokens.
        """
        requests = workload.warm_and_measured(self.checkpoint, mix, warmup, count, mean)
        run = drive(self.running.target, requests, arrivals, warmup, timeout)
        summary, measured = summarize(run, slo), requests[warmup:]
        mean_tokens = round(sum(request.output_tokens for request in measured) / count, 2)
        measurement: Measurement = {
            **self.server.to_json(),
            "generator": "asyncio",
            "settings": dict(self.running.settings),
            "command": self.running.command,
            "load": describe(mix, arrivals, count, warmup, _prompt_tokens(run), mean_tokens),
            **summary,
            **self._memory(),
        }
        rate = summary.get("tokens_per_second")
        # An open loop has no roofline: the server gets what is sent.
        if rates is not None and isinstance(arrivals, Closed) and isinstance(rate, float):
            measurement["limit"] = self._roofline(rates, arrivals.concurrency, measured, rate)
        return measurement

    def wave_seconds(self, concurrency: int, mean: int, timeout: float) -> float:
        """Return the seconds of `concurrency` requests of `mean` tokens each, sent at once.

        Raises NotRunError if one of them is not answered as asked.
        """
        requests = workload.requests(self.checkpoint, "equal", concurrency, mean)
        run = drive(self.running.target, requests, Closed(concurrency), 0, timeout)
        if failed := [record.error for record in run if record.error]:
            raise NotRunError(f"{len(failed)} of its first {concurrency} requests failed: {failed[0]}")
        return run.whole.seconds

    def _memory(self) -> Measurement:
        try:
            taken = memory_of(self.running.pid)
        except (FileNotFoundError, ProcessLookupError):
            # It has ended; the requests that it did not answer are errors in the measurement.
            return {}
        weights_mib = round(self.running.weights_mib, 1)
        return {"memory": {"kind": taken.kind, "weights_mib": weights_mib, "process_mib": round(taken.mib, 1)}}

    def _roofline(self, rates: DeviceRates, rows: int, requests: Sequence[Request], rate: float) -> Measurement:
        """Return the device's bound for this load in these weights, for any server: all concurrent requests may share
        a step."""
        config = LlamaConfig.from_pretrained(self.checkpoint)
        lengths = [request.output_tokens for request in requests]
        bound = roofline(config, self.server.weights, rates, rows, lengths, workload.PROMPT_TOKENS, steady=True)
        return {**bound.beside(rate)}


@contextmanager
def opened(server: Server, checkpoint: Path, threads: int) -> Iterator[Session]:
    """Start the server for the block. Raises NotRunError if it can't run here."""
    with server.start(checkpoint, threads) as running:
        yield Session(server, running, checkpoint)


def _prompt_tokens(run: Run) -> int:
    """Return the mean length of the prompts as the server counted them, else as they were generated."""
    counted = [record.prompt_tokens for record in run if record.prompt_tokens is not None]
    return round(sum(counted) / len(counted)) if counted else workload.PROMPT_TOKENS
