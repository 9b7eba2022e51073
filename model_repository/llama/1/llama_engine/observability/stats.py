"""Counting what happens: notes from the threads that work, added up and passed on by a thread of its own.

A note costs a list append; several times a second they are passed on to the registry. What the metrics are called and
mean is `metrics.py`'s.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter

from llama_engine.engine import Step
from llama_engine.errors import Cancelled, RequestError
from llama_engine.observability.metrics import (
    CANCELLATIONS,
    GENERATED_TOKENS,
    INTER_TOKEN_LATENCY,
    LAST_STEP,
    LATENCY,
    PROMPT_TOKENS,
    QUEUE_LIMIT,
    QUEUE_TIME,
    REQUESTS,
    SLOTS,
    SLOTS_IN_USE,
    STEP_ERRORS,
    STEP_PREFILL_TOKENS,
    STEP_ROWS,
    STEPS,
    TIME_TO_FIRST_TOKEN,
    WAITING,
    Metric,
    Registry,
)
from llama_engine.rows import Completion, reason
from llama_engine.tickets import Ticket

FLUSH_SECONDS = 0.2
"""How old a metric may be."""

_log = logging.getLogger(__name__)


class Meter:
    """Takes notes, and passes them on from a thread of its own."""

    def __init__(self, registry: Registry, slots: int, queue_limit: int = 0) -> None:
        """queue_limit: requests that Triton's queue takes; 0 is no limit, as in Triton's config."""
        self._registry = registry
        self._lock = threading.Lock()
        self._counts: Counter[tuple[Metric, str]] = Counter()
        self._levels: dict[Metric, float] = {SLOTS: slots, SLOTS_IN_USE: 0, WAITING: 0, QUEUE_LIMIT: queue_limit}
        self._observations: list[tuple[Metric, float]] = []
        self._last_step = 0.0
        self._failing = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def stepped(self, step: Step, now: float, running: int, waiting: int) -> None:
        """Note a step that ended `now`, on the monotonic clock, and who is left."""
        with self._lock:
            self._counts[STEPS, ""] += 1
            if step.errors:
                self._counts[STEP_ERRORS, ""] += step.errors
            if step.chosen:
                self._counts[GENERATED_TOKENS, ""] += step.chosen
                self._observations.append((STEP_ROWS, step.chosen))
            if step.prefilled:
                self._observations.append((STEP_PREFILL_TOKENS, step.prefilled))
            if step.decoded:
                # Who decodes had a token in the step before.
                self._observations.append((INTER_TOKEN_LATENCY, now - self._last_step))
            self._last_step = now
            self._levels |= {SLOTS_IN_USE: running, WAITING: waiting}
            # Steps that only read prompts don't hide that every step which should choose a token fails.
            self._failing = not step.chosen and (step.failed or self._failing)
            if not self._failing:
                self._levels[LAST_STEP] = time.time()

    def ended(self, ticket: Ticket) -> None:
        """Note a row that has its outcome."""
        assert ticket.outcome is not None
        with self._lock:
            self._counts[REQUESTS, reason(ticket.outcome)] += 1
            if isinstance(ticket.outcome, Cancelled):
                self._counts[CANCELLATIONS, ""] += 1
            if not math.isnan(ticket.entered):
                self._counts[PROMPT_TOKENS, ""] += len(ticket.row.request.prompt_tokens)
                self._observations.append((QUEUE_TIME, ticket.entered - ticket.arrived))
            if not math.isnan(ticket.started):
                self._observations.append((TIME_TO_FIRST_TOKEN, ticket.started - ticket.arrived))
            if isinstance(ticket.outcome, Completion):
                self._observations.append((LATENCY, ticket.ended - ticket.arrived))

    def refused(self, error: RequestError) -> None:
        """Note a request that never became a row."""
        with self._lock:
            self._counts[REQUESTS, reason(error)] += 1

    def failed(self) -> None:
        """Note a failure outside of a step."""
        with self._lock:
            self._counts[STEP_ERRORS, ""] += 1

    def level(self, running: int, waiting: int) -> None:
        """Note who is left after rows have come or gone without a step."""
        with self._lock:
            self._levels |= {SLOTS_IN_USE: running, WAITING: waiting}

    def close(self, timeout: float) -> None:
        """Pass on what is noted, at most `timeout` seconds, and end."""
        self._closing.set()
        self._thread.join(timeout)
        # Not while the thread may be in one of the metrics: two in one crash Triton.
        if not self._thread.is_alive():
            self._registry.close()

    def _run(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        """Pass on what is noted. What a counter or a gauge doesn't take is kept for the next time; an observation is
        lost, because keeping those would take more and more memory.
        """
        with self._lock:
            counts, self._counts = self._counts, Counter()
            levels, self._levels = self._levels, {}
            observations, self._observations = self._observations, []
        failures: list[Exception] = []
        for (metric, value), amount in counts.items():
            try:
                self._registry.add(metric, amount, value)
            except Exception as error:  # noqa: BLE001 - metrics must never stop the service
                failures.append(error)
                with self._lock:
                    self._counts[metric, value] += amount
        for metric, level in levels.items():
            try:
                self._registry.set(metric, level)
            except Exception as error:  # noqa: BLE001 - as above
                failures.append(error)
                with self._lock:
                    self._levels.setdefault(metric, level)
        for metric, observation in observations:
            try:
                self._registry.observe(metric, observation)
            except Exception as error:  # noqa: BLE001 - as above
                failures.append(error)
        if failures:
            _log.error("%d notes for the metrics could not be passed on", len(failures), exc_info=failures[0])
