"""Sends the events of sequences to their sinks, from a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from weakref import WeakSet

from llama_engine.engine.events import Chunk, Event, ResponseSink

PAUSE_ROUNDS = 3
"""Duration of the pause after a round, as a multiple of the round's duration."""

MAX_PAUSE_SECONDS = 0.02
"""Maximum duration of the pause, in seconds."""

_log = logging.getLogger(__name__)


class ResponseDispatcher:
    """Queues events and sends them from one thread. Thread-safe."""

    def __init__(self, pause_rounds: int = PAUSE_ROUNDS, max_pause: float = MAX_PAUSE_SECONDS) -> None:
        self._pause_rounds, self._max_pause = pause_rounds, max_pause
        self._changed = threading.Condition()
        self._pending: dict[ResponseSink, list[Event]] = {}
        # Pending sinks that don't wait for the end of a pause, in order.
        self._urgent: dict[ResponseSink, None] = {}
        self._started: WeakSet[ResponseSink] = WeakSet()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="responses", daemon=True)
        self._thread.start()

    def post(self, events: Iterable[tuple[ResponseSink, Event]]) -> None:
        """Queue events for their sinks and return at once."""
        with self._changed:
            for sink, event in events:
                self._pending.setdefault(sink, []).append(event)
                if sink not in self._started or not isinstance(event, Chunk):
                    self._started.add(sink)
                    self._urgent[sink] = None
            self._changed.notify()

    def wake(self, sink: ResponseSink) -> None:
        """Schedule another `send` of a sink, even if it has no new events; it doesn't wait for the end of a pause."""
        with self._changed:
            self._pending.setdefault(sink, [])
            self._urgent[sink] = None
            self._changed.notify()

    def close(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until all pending events are sent and the thread ends; return whether it has."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while sinks := self._next_round():
            began = time.monotonic()
            self._send(sinks)
            ended = time.monotonic()
            self._pause(ended + min(self._pause_rounds * (ended - began), self._max_pause))

    def _next_round(self) -> list[ResponseSink]:
        """Wait for pending sinks and return them; none after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closing)
            return list(self._pending)

    def _pause(self, until: float) -> None:
        """Send first chunks and results until that time, or until `close`."""
        while (left := until - time.monotonic()) > 0:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent or self._closing, left)
                if self._closing:
                    return
                sinks = list(self._urgent)
            self._send(sinks)

    def _send(self, sinks: list[ResponseSink]) -> None:
        for sink in sinks:
            with self._changed:
                self._urgent.pop(sink, None)
                events = self._pending.pop(sink)
            try:
                sink.send(events)
            except Exception:  # noqa: BLE001 - one failure must not end the thread
                _log.exception("a response could not be sent")
