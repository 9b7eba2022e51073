"""Readiness: whether a request that arrived now would be computed, which `is_ready` of a Triton model returns.

Never waits for a step. An engine of which every step failed gets a trial sequence of one token at each check: a load
balancer stops sending it requests, and without a step that works it would never become ready again.
"""

from __future__ import annotations

import logging

from llama_engine.api.generation_request import GenerationRequest
from llama_engine.engine import Engine
from llama_engine.scheduler import Scheduler
from llama_engine.sequence import Sequence, Status

_TRIAL = GenerationRequest(prompt="", prompt_tokens=(0,), max_tokens=1, min_tokens=1)

_log = logging.getLogger(__name__)


class Readiness:
    """Readiness of one engine and its scheduler."""

    def __init__(self, engine: Engine, scheduler: Scheduler) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._trial: Sequence | None = None
        self._logged = ""

    def check(self) -> bool:
        """Return whether the model is ready; log why not, once per reason."""
        problem = self._scheduler.problem()
        if problem != self._logged:
            self._logged = problem
            if problem:
                _log.error("the model isn't ready: %s", problem)
            else:
                _log.info("the model is ready again")
        if self._scheduler.failing and (self._trial is None or self._trial.status is Status.FINISHED):
            self._trial = self._engine.builder.build(_TRIAL)
            self._scheduler.add([self._trial])
        return not problem
