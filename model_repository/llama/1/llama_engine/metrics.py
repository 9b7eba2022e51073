"""What the server counts of itself: the metrics' names, units and meanings, and the thread that keeps them up to date.

The threads that work leave notes, a list append each; one thread of its own adds them up several times a second and
passes them on. Where they end up (Triton's metrics endpoint) is behind `Registry`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Literal, Protocol

from llama_engine.engine import Step
from llama_engine.errors import Cancelled, InvalidRequest, RequestError, Unavailable
from llama_engine.rows import Completion, Outcome
from llama_engine.tickets import Ticket

FLUSH_SECONDS = 0.2
"""How old a metric may be."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Metric:
    """One metric. label: the name of a label that tells its series apart, with all its values; none is one series."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    buckets: tuple[float, ...] = ()
    label: str = ""
    values: tuple[str, ...] = ("",)


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0)
_POWERS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)

REASONS = ("stop", "length", "cancelled", "unavailable", "invalid", "error")

REQUESTS = Metric(
    "llama_requests_total",
    "counter",
    "Rows answered, by how they ended: stop, length, cancelled, unavailable (out of time or server stopping), invalid "
    "(refused; one a request), error (decoding failed).",
    label="finish_reason",
    values=REASONS,
)
PROMPT_TOKENS = Metric("llama_prompt_tokens_total", "counter", "Prompt tokens of the rows that got a slot.")
GENERATED_TOKENS = Metric("llama_generated_tokens_total", "counter", "Tokens generated, of rows that were dropped too.")
CANCELLATIONS = Metric("llama_cancellations_total", "counter", "Rows given up because their client had gone.")
STEP_ERRORS = Metric("llama_step_errors_total", "counter", "Computations that failed, repeated parts included.")
STEPS = Metric("llama_steps_total", "counter", "Steps of the decode loop.")
TIME_TO_FIRST_TOKEN = Metric(
    "llama_time_to_first_token_seconds",
    "histogram",
    "From the row's arrival in the model (Triton's own queue comes before) to its first token.",
    _SECONDS,
)
INTER_TOKEN_LATENCY = Metric(
    "llama_inter_token_latency_seconds",
    "histogram",
    "Between two tokens of the rows that decode, one observation a step: in a step, they all wait equally long.",
    _STEP_SECONDS,
)
LATENCY = Metric(
    "llama_request_latency_seconds",
    "histogram",
    "From the row's arrival in the model to its last token, of rows that were completed.",
    _SECONDS,
)
QUEUE_TIME = Metric(
    "llama_queue_time_seconds",
    "histogram",
    "From the row's arrival in the model to its slot. Triton's own queue is nv_inference_queue_duration_us.",
    _SECONDS,
)
STEP_ROWS = Metric("llama_step_rows", "histogram", "Rows that chose a token in a step.", _POWERS)
STEP_PREFILL_TOKENS = Metric(
    "llama_step_prefill_tokens",
    "histogram",
    "Prompt tokens read in a step, padding included, of the steps that read any.",
    (*_POWERS, 2048.0, 4096.0, 8192.0),
)
SLOTS = Metric("llama_slots", "gauge", "Rows that can be decoded together.")
SLOTS_IN_USE = Metric("llama_slots_in_use", "gauge", "Rows that have a slot.")
WAITING = Metric("llama_waiting_rows", "gauge", "Rows that Triton has handed over and that have no slot yet.")
LAST_STEP = Metric(
    "llama_last_step_timestamp_seconds",
    "gauge",
    "When the last step ended, in seconds since 1970; its age is time() - llama_last_step_timestamp_seconds.",
)

METRICS = (
    REQUESTS, PROMPT_TOKENS, GENERATED_TOKENS, TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY, LATENCY, QUEUE_TIME,
    STEP_ROWS, STEP_PREFILL_TOKENS, SLOTS, SLOTS_IN_USE, WAITING, STEPS, STEP_ERRORS, CANCELLATIONS, LAST_STEP,
)  # fmt: skip


class Registry(Protocol):
    """Where the metrics are kept. value: of the metric's label."""

    def add(self, metric: Metric, amount: float, value: str = "") -> None:
        """Increase a counter."""

    def set(self, metric: Metric, amount: float) -> None:
        """Set a gauge."""

    def observe(self, metric: Metric, amount: float) -> None:
        """Put a value into a histogram."""


class Meter:
    """Takes notes, and passes them on from a thread of its own."""

    def __init__(self, registry: Registry, slots: int) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._counts: Counter[tuple[Metric, str]] = Counter()
        self._levels: dict[Metric, float] = {SLOTS: slots, SLOTS_IN_USE: 0, WAITING: 0}
        self._observations: list[tuple[Metric, float]] = []
        self._last_step = 0.0
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
            self._levels |= {SLOTS_IN_USE: running, WAITING: waiting, LAST_STEP: time.time()}

    def ended(self, ticket: Ticket) -> None:
        """Note a row that has its outcome."""
        assert ticket.outcome is not None
        with self._lock:
            self._counts[REQUESTS, _reason(ticket.outcome)] += 1
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
            self._counts[REQUESTS, _reason(error)] += 1

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


def _reason(outcome: Outcome) -> str:
    if isinstance(outcome, Completion):
        return outcome.finish_reason
    if isinstance(outcome, Cancelled):
        return "cancelled"
    if isinstance(outcome, Unavailable):
        return "unavailable"
    return "invalid" if isinstance(outcome, InvalidRequest) else "error"
