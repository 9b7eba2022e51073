"""Polling for cancelled requests: Triton's Python backend reports a cancellation only when it is asked."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from llama_engine.events import ResponseSink
from llama_engine.sequence import Sequence

POLL_SECONDS = 0.02
"""Pause between two rounds of polls."""

POLL_SHARE = 20
"""Polling takes at most one part in POLL_SHARE of the time: every poll is a round trip to Triton's process."""

MAX_PAUSE_SECONDS = 0.25
"""However long a round of polls takes, so that a cancelled request leaves soon."""

_log = logging.getLogger(__name__)


def poll_cancellation(
    next_poll: Callable[[float], list[Sequence] | None], cancel: Callable[[list[Sequence]], None]
) -> None:
    """Poll the sinks of sequences until there are no more rounds.

    next_poll: waits for as many seconds and returns the sequences to poll; None ends the polling. cancel: takes those
    whose clients have cancelled.
    """
    pause = POLL_SECONDS
    while (sequences := next_poll(pause)) is not None:
        began = time.monotonic()
        cancelled = {sink for sink in {sequence.sink for sequence in sequences} if _is_cancelled(sink)}
        pause = (POLL_SHARE - 1) * (time.monotonic() - began)
        pause = min(max(POLL_SECONDS, pause), MAX_PAUSE_SECONDS)
        if cancelled:
            cancel([sequence for sequence in sequences if sequence.sink in cancelled])


def _is_cancelled(sink: ResponseSink) -> bool:
    try:
        return sink.is_cancelled()
    except Exception:  # noqa: BLE001 - a sink that can't be polled stays, and the others are polled too
        _log.exception("can't tell whether a request was cancelled; it goes on")
        return False
