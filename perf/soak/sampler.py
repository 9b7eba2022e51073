"""The samples of a soak: what the server takes, and its metrics, every few seconds."""

from __future__ import annotations

import asyncio
import time

from perf.load.summary import percentiles
from perf.overhead.processes import ServerProcesses
from perf.soak import resources
from perf.soak.observed import Sample, Soaked
from perf.soak.phases import Phases
from perf.soak.resources import Readings
from perf.soak.stack import Part, Stack

_SHORTEST_INTERVAL_S = 0.5
"""Tokens per second over less are chance."""


class Sampler:
    """Adds samples to a soak's observations. processes: of the server that runs now."""

    def __init__(self, stack: Stack, processes: ServerProcesses, soaked: Soaked, phases: Phases, began: float) -> None:
        """began: the start of the soak, on the monotonic clock."""
        self.processes = processes
        self.paused = asyncio.Lock()
        """Held while a sample is taken; a restart holds it while a part is gone."""
        self._stack = stack
        self._soaked = soaked
        self._phases = phases
        self._began = self._sampled = began
        self._generated = soaked.lives[0].before.total("llama_generated_tokens_total")
        self._life = self._endpoint_life = 0

    def begin_life(self, part: Part, before: Readings) -> None:
        """Go on with the processes that run after the restart of a part. before: the metrics of the idle server."""
        self._endpoint_life += 1
        if part == "server":
            self._life += 1
            self.processes = ServerProcesses.of(self._stack.server.pid)
        self._generated, self._sampled = before.total("llama_generated_tokens_total"), time.monotonic()

    async def keep_sampling(self) -> None:
        """Take samples until it is cancelled."""
        while True:
            async with self.paused:
                await self._sample()
            await asyncio.sleep(self._soaked.course.sample_seconds)

    async def _sample(self) -> None:
        now = await asyncio.to_thread(resources.read, self._stack.server)
        endpoint = None if self._stack.endpoint is None else self._stack.endpoint.pid
        figures = await asyncio.to_thread(resources.of, self.processes, endpoint)
        moment, generated = time.monotonic(), now.total("llama_generated_tokens_total")
        latencies = self._soaked.tally.take_latencies()
        figures |= {
            "slots_in_use": now.total("llama_slots_in_use"),
            "waiting": now.total("llama_waiting_rows"),
            "pending": now.total("nv_inference_pending_request_count"),
            "tokens_per_second": (generated - self._generated) / max(moment - self._sampled, _SHORTEST_INTERVAL_S),
            "answers": len(latencies),
        }
        if latencies:
            figures["p95_ms"] = percentiles(latencies)["p95"]
        seconds = moment - self._began
        self._soaked.samples.append(Sample(seconds, self._phases.phase, figures, self._life, self._endpoint_life))
        self._sampled, self._generated = moment, generated
