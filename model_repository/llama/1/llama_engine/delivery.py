"""Answers on their way out: from the thread that steps to a thread that sends, in order and with nothing lost.

Handing one over costs a list append; sending costs a round trip to Triton's process. When the sender is behind, what
has come for one request in the meantime goes out together, and the requests take turns. Knows neither Triton nor text.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from llama_engine.rows import Outcome, Piece

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """Something that happened to row `index` of a request: a piece of its text, or its outcome, which is the last."""

    index: int
    what: Piece | Outcome


class Reply(Protocol):
    """The way back to who sent a request; hashable by identity."""

    def send(self, parts: Sequence[Part]) -> None:
        """Send what has happened since the last call, in order."""

    def is_cancelled(self) -> bool:
        """Ask whether anybody still wants it. May take a while, and is asked by one thread at a time."""


class Delivery:
    """The thread that sends."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: OrderedDict[Reply, list[Part]] = OrderedDict()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="delivery", daemon=True)
        self._thread.start()

    def post(self, parts: Iterable[tuple[Reply, Part]]) -> None:
        """Hand over what is to be sent, and go on."""
        with self._changed:
            for reply, part in parts:
                self._due.setdefault(reply, []).append(part)
            self._changed.notify()

    def close(self, timeout: float) -> bool:
        """Send what is due, at most `timeout` seconds, and end; return whether everything was sent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._closing)
                if not self._due:
                    return
                reply, parts = self._due.popitem(last=False)
            try:
                reply.send(parts)
            except Exception:  # noqa: BLE001 - one answer that can't be sent must not keep the others
                _log.exception("an answer could not be sent")
