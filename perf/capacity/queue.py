"""A replica as a queue that is served in batches, simulated step by step, and the users that it has room for.

A step prefills at most PREFILL_TOKENS, in order of arrival, and then decodes a token of each running sequence, as
`Engine.step` does. Left out: that attention to a longer context takes longer, prefix hits, drafts, a full KV cache.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from perf.load.records import Record
from perf.load.summary import inter_token_latency, percentiles
from perf.load.workload import SLOTS, lengths

PREFILL_TOKENS = 512
"""The default of the setting `prefill_tokens`."""
CHECKED = 0.7
"""The highest share of the most requests per second at which `make capacity` checks the queue."""
SAMPLE = 1000
"""Requests of a simulation that looks for the highest rate."""


class Replica(NamedTuple):
    """prefill: seconds of a prompt token. decode: seconds of a step by the number of its sequences, in order."""

    prefill: float
    decode: Mapping[int, float]

    @classmethod
    def measured(cls, ttft: float, prompt: float, output: float, rates: Mapping[int, float]) -> Replica:
        """Return the replica of closed loops: one user's TTFT in s, and requests per second by the number of users.

        A request takes its prefill and, with `users` sequences in each step, a share of its `output` steps.
        """
        return cls(ttft / prompt, {users: users * (1 / rate - ttft) / output for users, rate in rates.items()})

    def decode_s(self, sequences: int) -> float:
        """Return the seconds of a decode step, interpolated."""
        return float(np.interp(sequences, list(self.decode), list(self.decode.values()))) if sequences else 0.0

    def saturated(self, prompt: float, output: float) -> float:
        """Return the requests per second while all slots are taken."""
        return 1 / (self.prefill * prompt + output * self.decode_s(SLOTS) / SLOTS)


@dataclass
class Arrival:
    """A request. at: its second. prompt, output: tokens left to prefill, and to generate. times: of those generated."""

    at: float
    prompt: int
    output: int
    times: list[float] = field(default_factory=list)


def poisson(rate: float, prompt: int, outputs: Iterable[int], seed: int) -> list[Arrival]:
    """Return arrivals at `rate` requests per second, one for each length of an output."""
    chance, lengths = random.Random(seed), list(outputs)
    moments = accumulate(chance.expovariate(rate) for _ in lengths)
    return [Arrival(at, prompt, output) for at, output in zip(moments, lengths, strict=True)]


def simulate(replica: Replica, arrivals: Sequence[Arrival]) -> list[Record]:
    """Return the records of requests to a replica, in order of arrival."""
    waiting, prefilling, running = deque(arrivals), deque[Arrival](), list[Arrival]()
    now = 0.0
    while waiting or prefilling or running:
        if not (prefilling or running):
            now = max(now, waiting[0].at)
        while waiting and waiting[0].at <= now and len(prefilling) + len(running) < SLOTS:
            prefilling.append(waiting.popleft())
        started, budget = list[Arrival](), PREFILL_TOKENS
        while prefilling and budget:
            tokens = min(budget, prefilling[0].prompt)
            prefilling[0].prompt -= tokens
            budget -= tokens
            if not prefilling[0].prompt:
                started.append(prefilling.popleft())
        now += replica.prefill * (PREFILL_TOKENS - budget)
        for each in started:
            each.times.append(now)
        now += replica.decode_s(len(running))
        for each in running:
            each.times.append(now)
        running = [each for each in (*running, *started) if len(each.times) < each.output]
    return [Record(each.at, each.at, each.times[-1], each.times, output_tokens=each.output) for each in arrivals]


def figures(records: Iterable[Record]) -> dict[str, Any]:
    """Return tokens per second until the last answer's end, and percentiles of TTFT and ITL in ms."""
    answered = [record for record in records if not record.error]
    itls = (inter_token_latency(record) for record in answered)
    rate = sum(record.output_tokens for record in answered) / max(record.ended for record in answered)
    return {
        "tokens_per_second": round(rate, 1),
        "time_to_first_token_ms": percentiles([record.token_times[0] - record.scheduled for record in answered]),
        "inter_token_latency_ms": percentiles([itl for itl in itls if itl is not None]),
    }


class Kind(NamedTuple):
    """A kind of users: each sends a request of so many tokens every `period` s. ttft, itl: bounds of the p95 in s."""

    prompt: int
    output: int
    period: float
    ttft: float
    itl: float


KINDS = {
    "chat": Kind(100, 200, 60.0, 1.0, 0.05),
    "retrieval": Kind(600, 100, 120.0, 2.0, 0.1),
    "batch": Kind(600, 100, 60.0, 60.0, 1.0),
}


def highest_rate(replica: Replica, kind: Kind) -> float:
    """Return the most requests per second of a kind for which a replica keeps its bounds, to 2 %, as far as CHECKED."""
    outputs = lengths("uniform", SAMPLE, kind.output)
    random.Random(0).shuffle(outputs)
    low, high = 0.0, CHECKED * replica.saturated(kind.prompt, kind.output)
    while high - low > high / 50:
        rate = (low + high) / 2
        found = figures(simulate(replica, poisson(rate, kind.prompt, outputs, 0)))
        ttft, itl = (found[name]["p95"] for name in ("time_to_first_token_ms", "inter_token_latency_ms"))
        low, high = (rate, high) if ttft <= 1e3 * kind.ttft and itl <= 1e3 * kind.itl else (low, rate)
    return low
