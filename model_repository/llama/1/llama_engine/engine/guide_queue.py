"""Compiles the guides of waiting sequences, one at a time and in the order in which the sequences are admitted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from llama_engine.engine.events import FAILURE
from llama_engine.engine.failures import log_name
from llama_engine.engine.sequence import Sequence, Status
from llama_engine.errors import RequestError

if TYPE_CHECKING:
    from llama_engine.guides.compiler import Guides
    from llama_engine.guides.matcher import GuideState

GUIDE_SECONDS = 0.05
"""Maximum seconds that `wait` waits for guides to compile; nearly all compile faster."""

MAX_WAITING_GUIDES = 64
"""Maximum number of requests whose guides are being compiled or wait for that; further ones are refused."""

_log = logging.getLogger(__name__)


class GuideQueue:
    """Compiles the guides of one scheduler's waiting sequences, which its lock guards."""

    def __init__(
        self,
        guides: Guides,
        slots: int,
        changed: threading.Condition,
        abort: Callable[[list[Sequence], RequestError], None],
    ) -> None:
        """changed: the scheduler's lock, notified with each guide. abort: finishes sequences whose guides are refused.

        slots: maximum number of guides compiled ahead, because a compiled guide takes megabytes.
        """
        self._guides, self._slots, self._changed, self._abort = guides, slots, changed, abort
        # Time at which the guide that is being compiled started, or later.
        self._began = 0.0

    def has_room(self, sequence: Sequence, waiting: list[Sequence]) -> bool:
        """Return whether a sequence may wait for its guide besides the waiting sequences."""
        requests = {other.context.sink for other in waiting if other.status is Status.WAITING_FOR_GUIDE}
        if not requests:
            self._began = time.monotonic()
        return len(requests | {sequence.context.sink}) <= MAX_WAITING_GUIDES

    def startable(self, guided: list[Sequence]) -> list[Sequence]:
        """Return the sequences whose guides may be compiled now and aren't yet.

        guided: the waiting sequences whose requests have a guide, in order of admission.
        """
        return [sequence for sequence in guided[: self._slots] if sequence.guide is None]

    def start(self, guided: list[Sequence]) -> None:
        """Start compiling guides. guided: see `startable`."""
        for sequence in self.startable(guided):
            request = sequence.request
            sequence.guide = self._guides.start(request.guided_decoding_guide_type, request.guided_decoding_guide)
            sequence.guide.add_done_callback(partial(self._take, sequence))

    def wait(self, sequences: list[Sequence]) -> None:
        """Wait for the guides of sequences, at most GUIDE_SECONDS, and not if the current one takes longer already."""

        def compiled() -> bool:
            stalled = time.monotonic() - self._began > GUIDE_SECONDS
            return stalled or all(sequence.status is not Status.WAITING_FOR_GUIDE for sequence in sequences)

        self._changed.wait_for(compiled, GUIDE_SECONDS)

    def _take(self, sequence: Sequence, guide: Future[GuideState]) -> None:
        """Apply a compiled guide to its sequence, which can then be admitted; on an error, finish the sequence."""
        with self._changed:
            self._began = time.monotonic()
            if sequence.status is not Status.WAITING_FOR_GUIDE:
                return
            try:
                sequence.follow_guide(guide.result())
            except RequestError as error:
                self._abort([sequence], error)
            except Exception:  # noqa: BLE001 - any failure: the client must get a response
                _log.exception("compiling the guide of %s failed", log_name([sequence]))
                self._abort([sequence], FAILURE)
            self._changed.notify_all()
