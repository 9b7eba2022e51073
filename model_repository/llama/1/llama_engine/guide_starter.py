"""Start the guides of waiting sequences in threads of their own: a hostile guide takes seconds.

Meanwhile other sequences are admitted, and these are cancelled, late or drained as all that wait. One thread starts
guides that are known to take milliseconds, and so never waits for the other one's, which are checked by one process
anyway. In both, requests take turns: a request may have many choices, and each has a guide of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from llama_engine.engine import Engine
from llama_engine.errors import RequestError
from llama_engine.sequence import FAILURE, Sequence, names_of

MAX_WAITING_GUIDES = 32
"""Guides that wait to be checked, or compiled for long; the choices of a request share one."""

_log = logging.getLogger(__name__)


class GuideStarter:
    """The threads. Only the scheduler calls it, while it holds its lock."""

    def __init__(
        self,
        engine: Engine,
        wait_for_turn: Callable[[Sequence], bool],
        on_started: Callable[[Sequence, RequestError | None], None],
    ) -> None:
        """The threads call both. wait_for_turn: returns whether to start a sequence's guide, once that may be done.
        on_started: gets the error of a sequence whose guide can't be started.
        """
        self._engine, self._wait_for_turn, self._on_started = engine, wait_for_turn, on_started
        # Each starts its thread with the first task.
        self._quick, self._slow = ThreadPoolExecutor(1, "quick guides"), ThreadPoolExecutor(1, "guides")
        self._room = threading.Semaphore(MAX_WAITING_GUIDES)

    def add(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Queue those of the sequences that are not ready; return those for which there is no room."""
        refused: list[Sequence] = []
        for _, group in groupby((one for one in sequences if not one.is_ready), _guide_of):
            choices = list(group)
            quick = self._engine.starts_soon(choices[0])
            if quick or self._room.acquire(blocking=False):
                self._submit(choices, has_room=not quick)
            else:
                refused += choices
        return refused

    def close(self) -> None:
        """Start no more guides; a check in progress ends. What waits must have been answered."""
        for thread in (self._quick, self._slow):
            thread.shutdown(wait=False, cancel_futures=True)
        self._engine.close()

    def _submit(self, choices: list[Sequence], has_room: bool) -> None:
        thread = self._quick if self._engine.starts_soon(choices[0]) else self._slow
        thread.submit(self._start, choices, has_room)

    def _start(self, choices: list[Sequence], has_room: bool) -> None:
        """Start the guide of the first choice that has no result, such as Cancelled, yet; queue the others again."""
        choices = [sequence for sequence in choices if sequence.result is None]
        try:
            if choices and self._wait_for_turn(choices[0]):
                self._on_started(choices[0], self._error(choices[0]))
        finally:
            if choices[1:]:
                # Raises after `close`, when they have been answered.
                self._submit(choices[1:], has_room)
            elif has_room:
                self._room.release()

    def _error(self, sequence: Sequence) -> RequestError | None:
        """Start a sequence's guide; return its error."""
        try:
            self._engine.start_guide(sequence)
        except RequestError as error:
            return error
        except Exception:  # noqa: BLE001 - any failure: its client must get an answer
            _log.exception("starting the guide of %s failed", names_of([sequence]))
            return FAILURE
        return None


def _guide_of(sequence: Sequence) -> tuple[int, str, str]:
    request = sequence.request
    return id(sequence.sink), request.guided_decoding_guide_type, request.guided_decoding_guide
