"""Passes responses from the engine's thread to a thread that sends them, in order and without loss.

Posting costs a list append; sending costs a round trip to Triton's process (0.3 ms). While sending lags behind, the
events of one request accumulate and are sent together. Requests are served round-robin.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable

from llama_engine.events import Event, ResponseSink

_log = logging.getLogger(__name__)


class ResponseDispatcher:
    """Queues events and sends them from one thread. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending: OrderedDict[ResponseSink, list[Event]] = OrderedDict()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="responses", daemon=True)
        self._thread.start()

    def post(self, events: Iterable[tuple[ResponseSink, Event]]) -> None:
        """Queue events for their sinks and return at once."""
        with self._changed:
            for sink, event in events:
                self._pending.setdefault(sink, []).append(event)
            self._changed.notify()

    def post_again(self, sink: ResponseSink) -> None:
        """Schedule another `send` of a sink, after all pending sinks, even if it has no new events."""
        with self._changed:
            self._pending.setdefault(sink, [])
            self._changed.notify()

    def close(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until all pending events are sent and the thread ends; return whether it has."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if not self._pending:
                    return
                sink, events = self._pending.popitem(last=False)
            try:
                sink.send(events)
            except Exception:  # noqa: BLE001 - one failure must not end the thread
                _log.exception("a response could not be sent")
