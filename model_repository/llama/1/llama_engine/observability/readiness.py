"""Whether a request that came now would be decoded: what `is_ready` of a Triton model answers.

Never waits for a step. An engine of which every step failed is tried again with a row of one token each time somebody
asks: nobody may send it requests any more, and without a step that works it would count as broken for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from llama_engine.api.request_parser import GenerationRequest
from llama_engine.delivery import Part
from llama_engine.engine import Engine
from llama_engine.scheduler import Scheduler
from llama_engine.tickets import Ticket

_TRIAL = GenerationRequest(prompt="", prompt_tokens=(0,), max_tokens=1, min_tokens=1)

_log = logging.getLogger(__name__)


class Readiness:
    """Answers for one engine and its scheduler."""

    def __init__(self, engine: Engine, scheduler: Scheduler) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._trial: Ticket | None = None
        self._said = ""

    def check(self) -> bool:
        """Return whether it is ready; the log says why not, once for every reason."""
        trouble = self._scheduler.trouble()
        if trouble != self._said:
            self._said = trouble
            if trouble:
                _log.error("the model isn't ready: %s", trouble)
            else:
                _log.info("the model is ready again")
        if self._scheduler.failing and (self._trial is None or self._trial.outcome is not None):
            self._trial = Ticket(self._engine.row(_TRIAL), _Nobody())
            self._scheduler.submit([self._trial])
        return not trouble


class _Nobody:
    """Who waits for the trial's answer: a Reply."""

    def send(self, parts: Sequence[Part]) -> None:
        """Forget them: what counts is the step."""

    def is_cancelled(self) -> bool:
        """Stay."""
        return False
