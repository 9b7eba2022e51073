"""Loads, and a server under them: closed loops of the same requests in the same order for every server.

A server is started once for a section's loads. One that fails is recorded with its reason and the run continues: one
server can't spoil a run of an hour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal, NamedTuple

from llama_engine.errors import one_line
from transformers import LlamaConfig

from perf.analyzer import run as analyzer
from perf.bench.counters import sampled
from perf.bench.measure import counted, entry, prefix_entry
from perf.bench.prefixes import PrefixLoad
from perf.checkpoint import described
from perf.command import CORES, Budget
from perf.environment import StealTime
from perf.load.generator import drive
from perf.load.protocols import Request
from perf.load.records import TIME_OVER, Run
from perf.results_file import Results
from perf.roofline.rates import DeviceRates
from perf.servers.running import NotRunError, Running, Server
from perf.workload import MEAN_OUTPUT, MIXES, Mix, warm_and_measured

SLOTS = 32
"""Slots of every server, and the default number of users."""
LOAD_S = 600.0
"""Maximum seconds of one load, and at most a quarter of the time left, so that a slow server leaves time for others."""
START_S = 30.0
"""Minimum seconds left to start another load."""


class Load(NamedTuple):
    """A closed loop. key: of its measurements, before the server's.

    measured: requests after a warm-up of one per user. mean: output tokens of a request. generator: perf_analyzer over
    gRPC, or ours over HTTP, which streams where the server does.
    """

    key: str
    mix: Mix
    users: int = SLOTS
    measured: int = 64
    mean: int = MEAN_OUTPUT
    generator: Literal["perf_analyzer", "asyncio"] = "asyncio"


_ARTICLE = {mix: Load(f"article/{mix}", mix, generator="perf_analyzer") for mix in MIXES}
SECTIONS: Mapping[str, Sequence[Load]] = {
    "article": [_ARTICLE["equal"]],
    "mixed": [_ARTICLE["uniform"], _ARTICLE["geometric"]],
    "peers": [Load(f"peers/closed/{mix}", mix) for mix in MIXES if mix != "equal"],
    "users": [
        Load(f"users/{mix}/{users}", mix, users, measured)
        for users, measured in ((1, 8), (8, 16), (128, 64))
        for mix in MIXES
        if mix != "equal"
    ],
}
LARGE = [Load("large/1", "uniform", 1, 4, MEAN_OUTPUT // 2), Load("large/32", "uniform", 32, 32, MEAN_OUTPUT // 2)]
"""Loads of the larger model: fewer requests with half the tokens."""

FORMATS = [Load("formats/1", "uniform", 1, 4), Load("formats/8", "uniform", 8, 16)]
"""Loads of the larger model in the formats of checkpoints."""


@dataclass(frozen=True)
class Bench:
    """A run's results and time, and the device's rates."""

    results: Results
    budget: Budget
    rates: DeviceRates

    def measure(self, servers: Sequence[Server], checkpoint: Path, loads: Sequence[Load | PrefixLoad]) -> None:
        """Start each server, apply the loads, stop them; every load has an entry of each server afterwards.

        Each load is applied to one server after the other, so that their measurements lie close together.
        What ends a server's measurements is the reason of all its loads that are left: it can't run, or it has not
        answered a load in time and may still be computing it.
        """
        for _ in zip_longest(*(self._measurements(server, checkpoint, loads) for server in servers)):
            pass

    def _measurements(self, server: Server, checkpoint: Path, loads: Sequence[Load | PrefixLoad]) -> Iterator[None]:
        """Run a server and measure a load at each step."""
        left = list(loads)
        try:
            self._refuse_late()
            self.budget.say(f"{server.key} is started …")
            with server.start(checkpoint, CORES) as running:
                self.budget.say(f"{server.key} runs: {running.command}")
                while left:
                    self._refuse_late()
                    self._note(left[0], server, self._apply(server, running, checkpoint, left[0]))
                    del left[0]
                    yield
        except Exception as error:  # noqa: BLE001 - any library may raise; the reason is recorded and printed
            reason = str(error) if isinstance(error, NotRunError) else one_line(error)
            for load in left:
                self._note(load, server, {**server.to_json(), "not_run": reason})

    def _refuse_late(self) -> None:
        if self.budget.left < START_S:
            raise NotRunError(f"{self.budget.left:.0f} s are left of --budget")

    def _apply(self, server: Server, running: Running, checkpoint: Path, load: Load | PrefixLoad) -> dict[str, object]:
        steal = StealTime()
        if isinstance(load, PrefixLoad):
            requests, warmup = load.requests(LlamaConfig.from_pretrained(checkpoint).vocab_size)
            measurement = prefix_entry(server, running, load, self._drive(running, requests, load.users, warmup))
        else:
            measurement = self._closed_loop(server, running, checkpoint, load)
        return {**measurement, "model": described(checkpoint), "stolen_share": round(steal.share(), 4)}

    def _closed_loop(self, server: Server, running: Running, checkpoint: Path, load: Load) -> dict[str, object]:
        # One request at a time takes minutes for each wave.
        measured = load.measured // 2 if server.key.startswith("naive") else load.measured
        requests = warm_and_measured(checkpoint, load.mix, load.users, measured, load.mean)
        more: dict[str, object] = {}
        if load.generator == "perf_analyzer":
            assert running.triton is not None, "perf_analyzer speaks to Triton alone"
            with sampled(running.triton.metrics_url) as counters:
                run, command = analyzer.measure(
                    running.triton.grpc_url, requests, load.users, load.users, self._timeout
                )
            more = {"command": command, **counted(counters, run, requests)}
        else:
            run = self._drive(running, requests, load.users, load.users)
        measurement = entry(server, running, checkpoint, load.mix, run, requests, self.rates, more)
        return {**measurement, "generator": load.generator}

    @property
    def _timeout(self) -> float:
        return min(LOAD_S, self.budget.left / 4)

    def _drive(self, running: Running, requests: Sequence[Request], users: int, warmup: int) -> Run:
        timeout = self._timeout
        run = drive(running.target, requests, users, warmup, timeout)
        if late := sum(TIME_OVER in record.error for record in run.records):
            raise NotRunError(f"{late} of {len(requests)} requests weren't answered within {timeout:.0f} s")
        return run

    def _note(self, load: Load | PrefixLoad, server: Server, measurement: Mapping[str, object]) -> None:
        """Write a measurement and print it in a line."""
        key = f"{load.key}/{server.key}"
        self.results.add(key, measurement)
        line = f"{measurement.get('tokens_per_second')} tokens/s, {measurement.get('errors')} errors"
        if "not_run" in measurement:
            line = f"not run: {measurement['not_run']}"
        self.budget.say(f"{key}: {line}")
