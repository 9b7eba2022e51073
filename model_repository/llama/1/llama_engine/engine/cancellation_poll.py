"""Polls the sinks of sequences for clients that have cancelled: Triton's Python backend has no callback for that."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from llama_engine.engine.events import ResponseSink

if TYPE_CHECKING:
    from llama_engine.engine.sequence import Sequence

POLL_SECONDS = 0.02
"""Minimum pause between two rounds of polls, in seconds."""

POLL_SHARE = 20
"""Polling takes at most 1 / POLL_SHARE of the time: every poll is a round trip to Triton's process."""

MAX_POLL_SECONDS = 0.25
"""Maximum pause between two rounds, in seconds; bounds how late a cancellation is noticed. Overrides POLL_SHARE."""

_log = logging.getLogger(__name__)


def poll_cancellation(
    next_poll: Callable[[float], list[Sequence] | None], cancel: Callable[[list[Sequence]], None]
) -> None:
    """Poll the sinks of waiting and running sequences for cancellation, until `next_poll` returns None.

    next_poll: takes a pause in seconds, waits that long, and returns the sequences to poll. cancel: takes the sequences
    whose clients have cancelled.
    """
    pause = POLL_SECONDS
    while (sequences := next_poll(pause)) is not None:
        began = time.monotonic()
        cancelled = {sink for sink in {sequence.context.sink for sequence in sequences} if _is_cancelled(sink)}
        pause = (POLL_SHARE - 1) * (time.monotonic() - began)
        pause = min(max(POLL_SECONDS, pause), MAX_POLL_SECONDS)
        if cancelled:
            cancel([sequence for sequence in sequences if sequence.context.sink in cancelled])


def _is_cancelled(sink: ResponseSink) -> bool:
    try:
        return sink.is_cancelled()
    except Exception:  # noqa: BLE001 - one failing poll must not end the polling of the other sinks
        _log.exception("can't tell whether a request was cancelled; it goes on")
        return False
