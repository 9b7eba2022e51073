"""A server under loads, and each run of a load as an entry of a result's measurements.

A server is started once for its loads. One that fails is recorded with its reason and the run continues: one server
can't spoil a run of an hour.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from llama_engine.errors import one_line
from transformers import LlamaConfig
from triton_llama.metrics_page import read_samples
from triton_supervisor.triton import MODEL

from perf import perf_analyzer
from perf.checkpoint import described, quantized
from perf.command import CORES, Budget
from perf.environment import StealTime, memory_of
from perf.load.generator import drive
from perf.load.records import TIME_OVER, Record, Run
from perf.load.summary import summarize
from perf.load.workload import PROMPT_TOKENS, Load
from perf.results_file import Results
from perf.roofline import DeviceRates, roofline
from perf.servers.running import NotRunError, Running, Server

LOAD_S = 600.0
"""Maximum seconds of one load, and at most a quarter of the time left, so that a slow server leaves time for others."""
START_S = 30.0
"""Minimum seconds left to start another load."""
_COUNTERS = ("llama_step_sequences_sum", "llama_step_sequences_count", "nv_inference_count", "nv_inference_exec_count")


@dataclass(frozen=True)
class Bench:
    """A run's results and time, and the device's rates.

    different: the measurements in which a server's answers are others than those of the first with its `same_answers`.
    """

    results: Results
    budget: Budget
    rates: DeviceRates
    different: list[str] = field(default_factory=list)
    _answers: dict[tuple[str, str], Sequence[Record]] = field(default_factory=dict)

    def measure(self, server: Server, checkpoint: Path, loads: Sequence[Load]) -> None:
        """Start a server, apply the loads, stop it; every load has an entry afterwards.

        What ends a server's measurements is the reason of all its loads that are left: it can't run, or it has not
        answered a load in time and may still be computing it.
        """
        left = list(loads)
        try:
            self._refuse_late()
            self.budget.say(f"{server.key} is started …")
            served = quantized(checkpoint, server.converted) if server.converted else checkpoint
            with server.start(served, CORES) as running:
                self.budget.say(f"{server.key} runs: {running.command}")
                while left:
                    self._refuse_late()
                    measurement = self._apply(server, running, checkpoint, left[0])
                    self._note(left[0], server, measurement)
                    del left[0]
        except Exception as error:  # noqa: BLE001 - any library may raise; the reason is recorded and printed
            reason = str(error) if isinstance(error, NotRunError) else one_line(error)
            for load in left:
                self._note(load, server, {**server.to_json(), "not_run": reason})

    def _refuse_late(self) -> None:
        if self.budget.left < START_S:
            raise NotRunError(f"{self.budget.left:.0f} s are left of --budget")

    def _apply(self, server: Server, running: Running, checkpoint: Path, load: Load) -> dict[str, object]:
        steal = StealTime()
        requests, warmup = load.requests(checkpoint)
        timeout = min(LOAD_S, self.budget.left / 4)
        command, batches = running.command, dict[str, object]()
        if load.perf_analyzer:
            assert running.triton is not None, "perf_analyzer speaks to Triton alone"
            before = _counters(running.triton.metrics_address)
            run, command = perf_analyzer.measure(running.triton.grpc_address, requests, load.users, warmup, timeout)
            grown = _counters(running.triton.metrics_address) - before
            batches = {
                "mean_sequences": round(grown["llama_step_sequences_sum"] / grown["llama_step_sequences_count"], 3),
                "mean_batch": round(grown["nv_inference_count"] / grown["nv_inference_exec_count"], 3),
            }
        else:
            run = drive(running.target, requests, load.users, warmup, timeout, load.seconds)
        lengths, prompt = _answered(run)
        self._compare(load, server, run.records)
        facts: dict[str, object] = {
            "mix": load.mix,
            "concurrency": load.users,
            "requests": len(run.measured),
            "warmup_requests": warmup,
            "mean_output_tokens": round(statistics.fmean(lengths), 2),
            "prompt_tokens": prompt,
        }
        if load.round is not None:
            facts["round"] = load.round
        summary = summarize(run)
        limit: dict[str, object] = {}
        if load.bounded and server.stored is None and "tokens_per_second" in summary:
            config = LlamaConfig.from_pretrained(checkpoint)
            # For any server in these weights: all users may share a step.
            bound = roofline(config, server.weights, self.rates, load.users, lengths, PROMPT_TOKENS)
            limit = {"limit": bound.beside(float(summary["tokens_per_second"]))}
        return {
            **server.to_json(),
            "settings": dict(running.settings),
            "command": command,
            "load": facts,
            **summary,
            **_memory(running),
            **batches,
            **limit,
            "model": described(checkpoint),
            "stolen_share": round(steal.share(), 4),
        }

    def _compare(self, load: Load, server: Server, records: Sequence[Record]) -> None:
        """Note whether answers differ from those of another server that must give the same."""
        if server.same_answers:
            others = self._answers.setdefault((load.key, server.same_answers), records)
            pairs = zip(records, others, strict=False)
            if any(record.text != other.text for record, other in pairs if not (record.error or other.error)):
                self.different.append(f"{load.key}/{server.key}")

    def _note(self, load: Load, server: Server, measurement: Mapping[str, object]) -> None:
        """Write a measurement, unless it is none and another run made one, and print it in a line."""
        key = f"{load.key}/{server.key}"
        if "not_run" not in measurement or "not_run" in self.results.measurements.get(key, {"not_run": ""}):
            self.results.add(key, measurement)
        line = f"{measurement.get('tokens_per_second')} tokens/s, {measurement.get('errors')} errors"
        if "not_run" in measurement:
            line = f"not run: {measurement['not_run']}"
        self.budget.say(f"{key}: {line}")


def _counters(metrics_address: str) -> Counter[str]:
    """Return the model's counters, summed over their other labels."""
    counters = Counter[str]()
    for name, _, value in read_samples(metrics_address, MODEL):
        if name in _COUNTERS:
            counters[name] += int(value)
    return counters


def _answered(run: Run) -> tuple[list[int], int | None]:
    """Return the measured answers' output tokens, and the mean of their prompts where the server counts them.

    Raises NotRunError if the time was over before all were answered, or if none was.
    """
    if late := sum(TIME_OVER in record.error for record in run.records):
        raise NotRunError(f"{late} of {len(run.records)} requests weren't answered in time")
    answered = [record for record in run.measured if not record.error]
    if not answered:
        raise NotRunError(f"all {len(run.measured)} requests failed: {run.measured[0].error}")
    prompts = [record.prompt_tokens for record in answered if record.prompt_tokens is not None]
    return [record.output_tokens for record in answered], round(statistics.fmean(prompts)) if prompts else None


def _memory(running: Running) -> dict[str, object]:
    try:
        kind, mib = memory_of(running.pid)
    except psutil.NoSuchProcess:
        # The requests that it did not answer are errors in the measurement.
        return {}
    return {"memory": {"kind": kind, "weights_mib": round(running.weights_mib, 1), "process_mib": round(mib, 1)}}
