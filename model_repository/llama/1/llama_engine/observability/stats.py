"""Stats: collects values from the engine's threads and writes them to the metrics from a background thread.

Recording costs a list append; every FLUSH_SECONDS the aggregated values are written to the registry.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from functools import partial

from llama_engine.engine.events import Completion, finish_reason
from llama_engine.engine.page_manager import CacheCounts
from llama_engine.engine.sequence import Sequence
from llama_engine.engine.step_result import StepResult
from llama_engine.errors import RequestError
from llama_engine.observability import metrics
from llama_engine.observability.metrics import Metric, Registry

FLUSH_SECONDS = 0.2
"""Seconds between two updates of the metrics."""

_log = logging.getLogger(__name__)


class Stats:
    """Records steps, finished sequences and load, and updates the metrics from a thread. Thread-safe."""

    def __init__(self, registry: Registry, slots: int, queue_limit: int = 0) -> None:
        """queue_limit: capacity of Triton's queue in requests; 0 is no limit, as in Triton's config."""
        self._registry = registry
        self._lock = threading.Lock()
        self._counts: Counter[tuple[Metric, str]] = Counter()
        self._gauges: dict[tuple[Metric, str], float] = {
            (metrics.MODEL_INFO, ""): 1,
            (metrics.SLOTS, ""): slots,
            (metrics.SLOTS_IN_USE, ""): 0,
            (metrics.WAITING, ""): 0,
            (metrics.QUEUE_LIMIT, ""): queue_limit,
        }
        self._observations: list[tuple[Metric, float]] = []
        self._last_step = 0.0
        self._failing = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        # Set the gauges before the model becomes ready.
        self._flush()
        self._thread.start()

    def record_step(self, step: StepResult, now: float, running: int, waiting: int) -> None:
        """Record a step that ended at `now`, on the monotonic clock. running, waiting: sequences after the step."""
        with self._lock:
            self._counts[metrics.STEPS, ""] += 1
            if step.errors:
                self._counts[metrics.STEP_ERRORS, ""] += step.errors
            if step.sampled:
                self._counts[metrics.GENERATED_TOKENS, ""] += step.sampled
                self._observations.append((metrics.STEP_SEQUENCES, step.sampled - step.verified))
            if step.prefill_tokens:
                self._observations.append((metrics.STEP_PREFILL_TOKENS, step.prefill_tokens))
            if step.decoded:
                # A decoding sequence got its previous token in the previous step.
                self._observations.append((metrics.INTER_TOKEN_LATENCY, now - self._last_step))
            for linear, count in step.term_counts.items():
                self._counts[metrics.INT8_COLUMNS, linear] += count.tokens * count.inputs
                self._counts[metrics.INT8_OUTLIER_COLUMNS, linear] += count.outlier_columns
                self._counts[metrics.INT8_PRODUCTS, linear] += count.products
            for draft in step.drafts:
                self._counts[metrics.DRAFT_TOKENS, draft.source] += len(draft.tokens)
                self._counts[metrics.ACCEPTED_DRAFT_TOKENS, draft.source] += draft.accepted
            if step.preempted:
                self._counts[metrics.PREEMPTIONS, ""] += step.preempted
            if step.dropped_kv_events:
                self._counts[metrics.DROPPED_KV_EVENTS, ""] += step.dropped_kv_events
            self._last_step = now
            self._set_load(running, waiting, step.cache)
            # After a failure, steps that only prefill must not update metrics.LAST_STEP: sampling may still fail.
            self._failing = not step.succeeded and (step.failed or self._failing)
            if not self._failing:
                self._gauges[metrics.LAST_STEP, ""] = time.time()

    def record_finished(self, sequence: Sequence) -> None:
        """Record a finished sequence."""
        assert sequence.result is not None
        with self._lock:
            self._counts[metrics.REQUESTS, finish_reason(sequence.result)] += 1
            if not math.isnan(sequence.admitted_at):
                self._counts[metrics.PROMPT_TOKENS, ""] += (
                    sequence.num_prompt_tokens - sequence.num_cached_prompt_tokens
                )
                self._observations.append((metrics.QUEUE_TIME, sequence.admitted_at - sequence.arrived_at))
            if not math.isnan(sequence.first_token_at):
                self._observations.append((metrics.TIME_TO_FIRST_TOKEN, sequence.first_token_at - sequence.arrived_at))
            if isinstance(sequence.result, Completion):
                self._observations.append((metrics.LATENCY, sequence.finished_at - sequence.arrived_at))

    def record_refused(self, error: RequestError) -> None:
        """Record a request that was refused before it had sequences."""
        with self._lock:
            self._counts[metrics.REQUESTS, finish_reason(error)] += 1

    def record_adapters(self, count: int) -> None:
        """Record how many LoRA adapters are loaded."""
        with self._lock:
            self._gauges[metrics.LOADED_ADAPTERS, ""] = count

    def record_error(self) -> None:
        """Record a failure outside of a step."""
        with self._lock:
            self._counts[metrics.STEP_ERRORS, ""] += 1

    def record_load(self, running: int, waiting: int, cache: CacheCounts | None = None) -> None:
        """Record the numbers of running and waiting sequences outside of a step, and the KV cache, None if unchanged.

        Sequences that are aborted between two steps free pages.
        """
        with self._lock:
            self._set_load(running, waiting, cache)

    def close(self, timeout: float) -> None:
        """Write the remaining values to the metrics and end the thread; wait for at most `timeout` seconds."""
        self._closing.set()
        self._thread.join(timeout)
        # Wait until the thread has ended: concurrent access to a metric crashes Triton.
        if not self._thread.is_alive():
            self._registry.close()

    def _set_load(self, running: int, waiting: int, cache: CacheCounts | None) -> None:
        self._gauges |= {(metrics.SLOTS_IN_USE, ""): running, (metrics.WAITING, ""): waiting}
        if cache is None:
            return
        pages = {"used": cache.used_pages, "cached": cache.idle_pages, "free": cache.free_pages}
        self._gauges |= {(metrics.KV_CACHE_PAGES, state): count for state, count in pages.items()}
        self._gauges[metrics.KV_CACHE_USAGE, ""] = cache.used_pages / max(sum(pages.values()), 1)
        for metric, count in (
            (metrics.PREFIX_QUERIES, cache.queried_tokens),
            (metrics.PREFIX_HITS, cache.hit_tokens),
            (metrics.EVICTIONS, cache.evicted_pages),
        ):
            if count:
                self._counts[metric, ""] += count

    def _run(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        """Write recorded values to the metrics. A failed update is lost."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            gauges, self._gauges = self._gauges, {}
            observations, self._observations = self._observations, []
        registry = self._registry
        updates = [partial(registry.add, metric, amount, label) for (metric, label), amount in counts.items()]
        updates += [partial(registry.set, metric, value, label) for (metric, label), value in gauges.items()]
        updates += [partial(registry.observe, metric, value) for metric, value in observations]
        for update in updates:
            try:
                update()
            except Exception:  # noqa: BLE001 - metrics must never stop the service
                _log.exception("an update of the metrics failed")
