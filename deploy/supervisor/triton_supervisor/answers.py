"""Whether a model has answered everything that it accepted, by its own count, while Triton still holds it.

Triton unloads a model when the last of its request objects is gone. It keeps the first one of a gRPC stream until the
stream ends, and for ever if it refused that one itself and the client left without closing the stream (perf/LOG.md).
"""

from __future__ import annotations

import contextlib
import struct
from http import HTTPStatus

from triton_llama.health import Address, NoAnswerError, exchange, pending_requests

from triton_supervisor.shared_memory import SHARED_MEMORY

FILES = "TRITON_LLAMA_REQUEST_COUNTS"
"""Environment variable for the models: the beginning of their files' paths. Each instance of a model has one, from its
start until Triton ends it, with the requests that it has accepted and those that it has answered, 8 bytes each."""

LOOKS = 8
"""Consecutive looks, a quarter of a second apart, that must find the same. A request on its way from Triton's queue to
the model is in neither count; it arrives as soon as the threads of tritonserver and of the model get a processor, and
between two looks tritonserver has answered two requests."""

_METRICS_S = 2.0
_COUNT = struct.Struct("=Q")


def counts_environment(shm_prefix: str) -> dict[str, str]:
    """Return the setting that makes the models count. `remove_shared_memory` with the prefix removes the files, too."""
    return {FILES: f"{SHARED_MEMORY}/{shm_prefix}requests-"}


class Answers:
    """What the models say. metrics: Triton's, for its queues; None when they are off, and the queues are then unknown:
    Triton hands their requests to an idle model at once, or after the config's `max_queue_delay_microseconds`."""

    def __init__(self, shm_prefix: str, metrics: Address | None) -> None:
        self._beginning = f"{shm_prefix}requests-"
        self._metrics = metrics
        self._found: dict[str, tuple[list[tuple[int, int]], int]] = {}

    def settled(self, model: str) -> bool:
        """Look; return whether this and the LOOKS - 1 looks before found everything answered and nothing new.

        False, too, for a model that doesn't count, or that Triton is ending.
        """
        counts = self._counts(model)
        before, looks = self._found.get(model, ([], 0))
        if not counts or self._unanswered(counts) or self._queued(model):
            self._found.pop(model, None)
            return False
        looks = looks + 1 if counts == before else 1
        self._found[model] = counts, looks
        return looks >= LOOKS

    def are_due(self, model: str) -> bool:
        """Return whether the model has accepted requests that it hasn't answered."""
        return self._unanswered(self._counts(model))

    def _counts(self, model: str) -> list[tuple[int, int]]:
        """Return how many requests each instance has accepted and answered; none if Triton has ended the model."""
        counts = []
        # Neither one that is removed nor one that is being made has an open request.
        gone = contextlib.suppress(FileNotFoundError, struct.error)
        for file in sorted(SHARED_MEMORY.glob(f"{self._beginning}{model}-*")):
            with gone, file.open("rb") as opened:
                # Answered first: those that were accepted by then are all in the other.
                opened.seek(_COUNT.size)
                (answered,) = _COUNT.unpack(opened.read(_COUNT.size))
                opened.seek(0)
                (accepted,) = _COUNT.unpack(opened.read(_COUNT.size))
                counts.append((accepted, answered))
        return counts

    @staticmethod
    def _unanswered(counts: list[tuple[int, int]]) -> bool:
        return any(accepted != answered for accepted, answered in counts)

    def _queued(self, model: str) -> bool:
        """Return whether requests wait in Triton's queue for the model, or may do so."""
        if self._metrics is None:
            return False
        try:
            page = exchange(self._metrics, "GET", "/metrics", _METRICS_S)
        except NoAnswerError:
            return True
        return page.status != HTTPStatus.OK or pending_requests(page.body, model) != 0
