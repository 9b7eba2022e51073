"""A server under loads, and each run of a load as an entry of a result's measurements.

A server is started once for its loads. One that fails is recorded with its reason and the run continues: one server
can't spoil a run of an hour.
"""

from __future__ import annotations

import re
import statistics
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import psutil
from llama_engine.errors import one_line
from transformers import LlamaConfig

from perf.analyzer import run as analyzer
from perf.analyzer.binary import BadExportError
from perf.bench.loads import Load
from perf.bench.prefixes import PrefixLoad
from perf.checkpoint import described
from perf.command import CORES, Budget
from perf.environment import StealTime, memory_of
from perf.load.generator import drive
from perf.load.records import TIME_OVER, Run
from perf.load.summary import summarize, summarize_prefixes
from perf.results_file import Results
from perf.roofline.physics import roofline
from perf.roofline.rates import DeviceRates
from perf.servers.running import NotRunError, Running, Server
from perf.workload import PROMPT_TOKENS

LOAD_S = 600.0
"""Maximum seconds of one load, and at most a quarter of the time left, so that a slow server leaves time for others."""
START_S = 30.0
"""Minimum seconds left to start another load."""
_COUNTER = re.compile(r"^(llama_step_rows_(?:sum|count)|nv_inference_(?:exec_)?count)(?:\{.*\})? (\S+)$", re.MULTILINE)


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
        answered a load in time and may still be computing it. Raises BadExportError.
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
        except BadExportError:
            raise
        except Exception as error:  # noqa: BLE001 - any library may raise; the reason is recorded and printed
            reason = str(error) if isinstance(error, NotRunError) else one_line(error)
            for load in left:
                self._note(load, server, {**server.to_json(), "not_run": reason})

    def _refuse_late(self) -> None:
        if self.budget.left < START_S:
            raise NotRunError(f"{self.budget.left:.0f} s are left of --budget")

    def _apply(self, server: Server, running: Running, checkpoint: Path, load: Load | PrefixLoad) -> dict[str, object]:
        steal = StealTime()
        requests, warmup = load.requests(checkpoint)
        timeout = min(LOAD_S, self.budget.left / 4)
        more: dict[str, object] = {}
        if isinstance(load, Load) and load.perf_analyzer:
            assert running.triton is not None, "perf_analyzer speaks to Triton alone"
            before = _counters(running.triton.metrics_url)
            run, command = analyzer.measure(running.triton.grpc_url, requests, load.users, warmup, timeout)
            grown = _counters(running.triton.metrics_url) - before
            more = {
                "command": command,
                "mean_rows": round(grown["llama_step_rows_sum"] / grown["llama_step_rows_count"], 3),
                "mean_batch": round(grown["nv_inference_count"] / grown["nv_inference_exec_count"], 3),
            }
        else:
            run = drive(running.target, requests, load.users, warmup, timeout)
            if late := sum(TIME_OVER in record.error for record in run.records):
                raise NotRunError(f"{late} of {len(requests)} requests weren't answered within {timeout:.0f} s")
        measurement = {**entry(server, running, load, run), **more}
        if isinstance(load, PrefixLoad):
            measurement |= summarize_prefixes(run)
        elif server.stored is None:
            measurement |= self._limit(server, checkpoint, run, measurement.get("tokens_per_second"))
        return {**measurement, "model": described(checkpoint), "stolen_share": round(steal.share(), 4)}

    def _limit(self, server: Server, checkpoint: Path, run: Run, rate: object) -> dict[str, object]:
        """Return the device's limit for this load in these weights, for any server: all users may share a step."""
        if not isinstance(rate, float):
            return {}
        config, lengths = LlamaConfig.from_pretrained(checkpoint), _lengths(run)
        bound = roofline(
            config, server.weights, self.rates, run.concurrency, lengths, PROMPT_TOKENS, True, server.floats
        )
        return {"limit": bound.beside(rate)}

    def _note(self, load: Load | PrefixLoad, server: Server, measurement: Mapping[str, object]) -> None:
        """Write a measurement and print it in a line."""
        key = f"{load.key}/{server.key}"
        self.results.add(key, measurement)
        line = f"{measurement.get('tokens_per_second')} tokens/s, {measurement.get('errors')} errors"
        if "not_run" in measurement:
            line = f"not run: {measurement['not_run']}"
        self.budget.say(f"{key}: {line}")


def entry(server: Server, running: Running, load: Load | PrefixLoad, run: Run) -> dict[str, object]:
    """Return the measurement of a run by the generator's figures."""
    prompts = [record.prompt_tokens for record in run.measured if record.prompt_tokens is not None]
    facts = {
        **load.facts(),
        "concurrency": run.concurrency,
        "requests": len(run.measured),
        "warmup_requests": run.warmup,
        "mean_output_tokens": round(statistics.fmean(_lengths(run)), 2),
        "prompt_tokens": round(statistics.fmean(prompts)) if prompts else None,
    }
    head = {**server.to_json(), "settings": dict(running.settings), "command": running.command, "load": facts}
    return {**head, **summarize(run), **_memory(running)}


def _counters(metrics_url: str) -> Counter[str]:
    """Return the counters of rows, steps, requests and batches, summed over their labels."""
    counters = Counter[str]()
    with urllib.request.urlopen(f"http://{metrics_url}/metrics", timeout=30) as response:
        for name, value in _COUNTER.findall(response.read().decode()):
            counters[name] += int(float(value))
    return counters


def _lengths(run: Run) -> list[int]:
    """Return the output tokens of the measured requests that were answered; of none, [0]."""
    return [record.output_tokens for record in run.measured if not record.error] or [0]


def _memory(running: Running) -> dict[str, object]:
    try:
        kind, mib = memory_of(running.pid)
    except psutil.NoSuchProcess:
        # The requests that it did not answer are errors in the measurement.
        return {}
    return {"memory": {"kind": kind, "weights_mib": round(running.weights_mib, 1), "process_mib": round(mib, 1)}}
