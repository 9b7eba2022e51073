"""Asking, every few seconds and in a thread of its own, whether the model still makes steps.

A question may take as long as its time limit, and meanwhile signals must be heard. What is asked is
`triton_llama.health`'s business; how often, and how many noes are a verdict, is this module's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from triton_llama.health import Address, Limits, Verdict, live

NOES = 3
"""One no may be a moment; so many in a row are a verdict."""

_EVERY_S = 5.0


@dataclass(frozen=True)
class Pace:
    """Seconds. step_age: while the last step is younger, nothing else is asked. timeout: for a token otherwise.

    every: between two questions. first: before the first one.
    """

    step_age: float
    timeout: float
    every: float
    first: float

    @classmethod
    def for_verdict_within(cls, seconds: float) -> Pace:
        """Return the pace at which a model that makes no step any more is found dead after about so long."""
        step_age = seconds / 4
        # The model has proved itself when it was loaded.
        return cls(step_age=step_age, timeout=seconds / 6, every=min(_EVERY_S, seconds / 24), first=step_age)


def live_question(http: Address, metrics: Address | None, pace: Pace) -> Callable[[], Verdict]:
    """Return the question whether the model at these addresses is alive. metrics: None when they are off."""
    limits = Limits(timeout=pace.timeout, step_age=pace.step_age)
    return lambda: live(http, metrics, limits)


class Liveness:
    """Asks until it is told to end, or has its verdict."""

    def __init__(self, question: Callable[[], Verdict], pace: Pace, say: Callable[[str], None]) -> None:
        """say: takes a line when the question itself fails, which is no fault of the model's."""
        self._question = question
        self._pace = pace
        self._say = say
        self._ended = threading.Event()
        self._death: str | None = None
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)

    def begin(self) -> None:
        """Start asking."""
        self._thread.start()

    def end(self) -> None:
        """Ask nothing more. Returns at once; an answer that is on its way doesn't count any more."""
        self._ended.set()

    def death(self) -> str | None:
        """Return why the model is dead; None as long as it isn't, or nobody asks any more."""
        return None if self._ended.is_set() else self._death

    def _run(self) -> None:
        noes = 0
        pause = self._pace.first
        while not self._ended.wait(pause):
            pause = self._pace.every
            try:
                verdict = self._question()
            except Exception as error:  # noqa: BLE001 - this thread's end would be nobody's to notice
                self._say(f"asking whether the model is alive failed: {type(error).__name__}: {error}")
                continue
            noes = 0 if verdict.ok else noes + 1
            if noes >= NOES:
                self._death = verdict.reason
                return
