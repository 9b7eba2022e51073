"""The scheduler: the waiting queue, admission, cancellation, deadlines, graceful shutdown; and the engine's thread.

Sequences are admitted to free slots by priority (lowest value first), then in order of arrival, as long as the KV cache
has pages for their prompts. While all slots or pages are taken, sequences wait here and `wait_until_admitted` blocks,
so that further requests stay in Triton's queue. A sequence that is cancelled or times out while waiting is never
computed. A sequence whose guide is being compiled also waits here; later sequences overtake it. What a step computes of
the admitted prompts is decided in prefill.py.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import insort
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from llama_engine.engine.cancellation_poll import poll_cancellation
from llama_engine.engine.dispatcher import ResponseDispatcher
from llama_engine.engine.engine import Engine
from llama_engine.engine.events import FAILURE, Event, ResponseSink
from llama_engine.engine.failures import log_name
from llama_engine.engine.guide_queue import GuideQueue
from llama_engine.engine.sequence import Sequence, Status
from llama_engine.engine.step_health import StepHealth
from llama_engine.engine.step_result import StepResult
from llama_engine.errors import Cancelled, QueueFull, RequestError, Stopping, Unavailable

if TYPE_CHECKING:
    from llama_engine.observability.stats import Stats
    from llama_engine.request.adapter_choice import Adapter

HANG_SECONDS = 10.0
"""Seconds that `stop` waits for a hanging step after the drain time."""

_STOPPING = Stopping()
_TOO_MANY_GUIDES = QueueFull("too many guides (guided_decoding_guide) wait to be compiled; try again later")

_log = logging.getLogger(__name__)


class Scheduler:
    """Queues sequences and runs the engine in a thread. Thread-safe."""

    def __init__(self, engine: Engine, dispatcher: ResponseDispatcher, stats: Stats, stuck_seconds: float) -> None:
        """stuck_seconds: duration of a step after which `problem` reports it as stuck; 0 disables the check."""
        self._engine, self._dispatcher, self._stats = engine, dispatcher, stats
        # The condition guards everything below. It is notified when a sequence arrives, gets its guide or a slot,
        # finishes or is cancelled.
        self._changed = threading.Condition()
        # Waiting sequences are in the order in which they are admitted.
        self._waiting: list[Sequence] = []
        self._running: dict[Sequence, None] = {}
        self._cancelled: list[Sequence] = []
        self._drain_until: float | None = None
        self._guide_queue = GuideQueue(engine.guides, engine.slots, self._changed, self._abort)
        self._health = StepHealth(stuck_seconds)
        self._stepping = threading.Thread(target=self._run, name="engine", daemon=True)
        self._polling = threading.Thread(
            target=poll_cancellation, args=(self._next_poll, self._cancel), name="cancellation", daemon=True
        )
        self._stepping.start()
        self._polling.start()

    def add(self, sequences: list[Sequence]) -> None:
        """Queue sequences; after `stop`, or if too many guides wait, finish them with Unavailable at once."""
        with self._changed:
            for sequence in sequences:
                waits_for_guide = sequence.status is Status.WAITING_FOR_GUIDE
                if self._drain_until is not None:
                    # The engine's thread may have ended.
                    self._finish(sequence, _STOPPING)
                elif waits_for_guide and not self._guide_queue.has_room(sequence, self._waiting):
                    self._finish(sequence, _TOO_MANY_GUIDES)
                else:
                    # Sort ascending by priority; sequences of equal priority keep their order of arrival.
                    insort(self._waiting, sequence, key=lambda waiting: waiting.request.priority)
            self._guide_queue.start(self._guided())
            self._changed.notify_all()

    def wait_until_admitted(self, sequences: list[Sequence]) -> None:
        """Block until every sequence is finished, or admitted: a slot is guaranteed to it in the next step.

        It waits for guides only briefly: Triton notices later requests up to 0.5 s late while `execute` blocks.
        """

        def admitted() -> bool:
            ready = [sequence for sequence in self._waiting if sequence.status is Status.WAITING]
            all_fit = len(ready) <= self._engine.slots - len(self._running) and self._engine.has_pages(ready)
            if self._drain_until is None and all_fit:
                return True
            return all(sequence.status is not Status.WAITING for sequence in sequences)

        with self._changed:
            if any(sequence.status is Status.WAITING_FOR_GUIDE for sequence in sequences):
                self._guide_queue.wait(sequences)
            self._changed.wait_for(admitted)

    def wait_until_finished(self, sequences: list[Sequence]) -> None:
        """Block until every sequence has its result and is no longer waiting or running."""
        with self._changed:
            self._changed.wait_for(
                lambda: not any(sequence in self._running or sequence in self._waiting for sequence in sequences)
            )

    def wait_until_unused(self, adapter: Adapter) -> None:
        """Block until no waiting or running sequence has this adapter. Raises Stopping after `stop`."""

        def unused() -> bool:
            return not any(sequence.request.adapter == adapter for sequence in [*self._waiting, *self._running])

        with self._changed:
            self._changed.wait_for(lambda: unused() or self._drain_until is not None)
            if self._drain_until is not None:
                raise Stopping

    @property
    def failing(self) -> bool:
        """As `StepHealth.failing`."""
        return self._health.failing

    def problem(self) -> str:
        """Return why a new sequence would not be computed, in a few words; empty if it would. Never blocks."""
        if self._drain_until is not None:
            return str(_STOPPING)
        return self._health.problem() if self._stepping.is_alive() else "the engine's thread has ended"

    def stop(self, drain_seconds: float) -> None:
        """Shut down: let running sequences finish for `drain_seconds`, fail all others, and end the threads."""
        with self._changed:
            self._drain_until = time.monotonic() + drain_seconds
            self._changed.notify_all()
        self._stepping.join(drain_seconds + HANG_SECONDS)
        if self._stepping.is_alive():
            with self._changed:
                _log.error("a step doesn't return; its %d sequences are answered without it", len(self._running))
                sequences = [*self._waiting, *self._running]
                self._waiting.clear()
                self._running.clear()
                for sequence in sequences:
                    self._finish(sequence, _STOPPING)
        self._polling.join(HANG_SECONDS)
        self._engine.guides.close()
        if self._engine.kv_events is not None:
            self._engine.kv_events.close()

    def _guided(self) -> list[Sequence]:
        """Return the waiting sequences that have a guide, in order of admission."""
        return [sequence for sequence in self._waiting if sequence.request.guided_decoding_guide_type]

    def _run(self) -> None:
        while True:
            try:
                if not self._schedule_and_step():
                    return
            except Exception:  # noqa: BLE001 - without this thread every client would wait forever
                _log.exception("scheduling failed; %d running sequences get an error", len(self._running))
                self._fail_running()

    def _fail_running(self) -> None:
        self._health.record_error()
        self._stats.record_error()
        with self._changed:
            self._abort(list(self._running), FAILURE)

    def _schedule_and_step(self) -> bool:
        """Abort cancelled and late sequences, admit waiting ones, and step; return False after the drain."""
        with self._changed:
            self._health.record_idle()
            while not self._has_work():
                # Wake up in time for the next deadline: a sequence that waits for its guide can time out.
                self._stats.record_load(0, len(self._waiting), self._engine.take_cache_counts())
                deadline = min((sequence.context.deadline for sequence in self._waiting), default=math.inf)
                self._changed.wait(min(deadline - time.monotonic(), threading.TIMEOUT_MAX))
            self._health.record_busy()
            self._abort_cancelled_and_late()
            self._admit()
            self._guide_queue.start(self._guided())
            # Record it before the step, so that the load is visible while a step hangs.
            self._stats.record_load(len(self._running), len(self._waiting))
            if not self._running:
                return self._drain_until is None
        step = self._engine.step(self._send_chunks)
        self._report(step)
        self._health.record_step(step)
        return True

    def _has_work(self) -> bool:
        """Whether there is work other than waiting for guides."""
        now, guided = time.monotonic(), self._guided()
        return (
            bool(self._running or self._cancelled or (guided and self._guide_queue.startable(guided)))
            or any(sequence.status is Status.WAITING or now >= sequence.context.deadline for sequence in self._waiting)
            or self._drain_until is not None
        )

    def _abort_cancelled_and_late(self) -> None:
        now = time.monotonic()
        self._abort(self._cancelled, Cancelled("the request was cancelled"))
        self._cancelled = []
        late = [sequence for sequence in self._waiting if now >= sequence.context.deadline]
        self._abort(late, Unavailable("the request's time was up before it got a slot"))
        if self._drain_until is not None:
            self._abort(list(self._waiting), _STOPPING)
            if now >= self._drain_until:
                self._abort(list(self._running), _STOPPING)

    def _admit(self) -> None:
        for sequence in [waiting for waiting in self._waiting if waiting.status is Status.WAITING]:
            if not self._engine.can_admit(sequence):
                return
            self._waiting.remove(sequence)
            self._running[sequence] = None
            self._engine.add(sequence)
            self._changed.notify_all()

    def _report(self, step: StepResult) -> None:
        """Dispatch the chunks and results of a step, and record it."""
        now = time.monotonic()
        with self._changed:
            events = self._next_chunks(list(self._running), lambda sequence: self._abort([sequence], FAILURE))
            # A sequence that `stop` has answered while this step hung is no longer running.
            finished = [sequence for sequence in step.finished if sequence in self._running]
            for sequence in finished:
                assert sequence.result is not None
                del self._running[sequence]
                events.append((sequence.context.sink, sequence.result))
            # Post them in one call, so that a sequence's last chunk is sent with its result.
            self._dispatcher.post(events)
            self._changed.notify_all()
            for sequence in finished:
                self._stats.record_finished(sequence)
            self._stats.record_step(step, now, len(self._running), len(self._waiting))

    def _send_chunks(self) -> None:
        """Dispatch chunks while the engine computes a step; `_report` sends those of finished sequences."""
        with self._changed:
            unfinished = [sequence for sequence in self._running if sequence.result is None]
            # The engine removes a sequence that fails here at the end of its step.
            self._dispatcher.post(self._next_chunks(unfinished, Sequence.fail))

    def _next_chunks(
        self, sequences: list[Sequence], on_failure: Callable[[Sequence], None]
    ) -> list[tuple[ResponseSink, Event]]:
        """Return the next chunks of those sequences that are streamed, with their sinks."""
        events: list[tuple[ResponseSink, Event]] = []
        for sequence in sequences:
            if not sequence.context.stream or isinstance(sequence.result, RequestError):
                continue
            try:
                chunk = sequence.chunk_cutter.next()
            except Exception:  # noqa: BLE001 - any failure: only this sequence gets an error
                _log.exception("making a chunk of %s failed", log_name([sequence]))
                self._stats.record_error()
                on_failure(sequence)
                continue
            if chunk is not None:
                events.append((sequence.context.sink, chunk))
        return events

    def _abort(self, sequences: Iterable[Sequence], error: RequestError) -> None:
        """Finish sequences that are still waiting or running with an error, and remove them."""
        for sequence in sequences:
            if sequence in self._waiting:
                self._waiting.remove(sequence)
                self._finish(sequence, error)
            elif sequence in self._running:
                del self._running[sequence]
                try:
                    # This precedes freeing the slot, which may raise.
                    self._finish(sequence, error)
                finally:
                    self._engine.remove(sequence)

    def _finish(self, sequence: Sequence, error: RequestError) -> None:
        """Finish a sequence that is no longer waiting or running, and dispatch its result."""
        sequence.finish(error)
        assert sequence.result is not None
        if sequence.guide is not None:
            sequence.guide.cancel()
        self._dispatcher.post([(sequence.context.sink, sequence.result)])
        self._changed.notify_all()
        self._stats.record_finished(sequence)

    def _next_poll(self, pause: float) -> list[Sequence] | None:
        """Wait `pause` seconds, then until there are sequences to poll; return them, or None after the drain."""
        with self._changed:
            self._changed.wait_for(lambda: self._drain_until is not None and not self._running, pause)
            self._changed.wait_for(lambda: self._waiting or self._running or self._drain_until is not None)
            if self._drain_until is not None and not self._running:
                return None
            return [*self._waiting, *self._running]

    def _cancel(self, sequences: list[Sequence]) -> None:
        with self._changed:
            self._cancelled += sequences
            self._changed.notify_all()
