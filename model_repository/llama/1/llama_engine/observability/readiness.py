"""Readiness: whether the model would compute a new request, for `is_ready` of the Triton model.

A check never waits for a step. While recent steps have only failed, each check schedules a probe request of one token:
a load balancer sends no requests to an unready server, and only a successful step makes it ready again.
"""

from __future__ import annotations

import logging

from llama_engine.engine.engine import Engine
from llama_engine.engine.scheduler import Scheduler
from llama_engine.engine.sequence import Sequence, Status
from llama_engine.request.generation_request import GenerationRequest

_PROBE = GenerationRequest(prompt="", prompt_tokens=(0,), max_tokens=1, min_tokens=1)

_log = logging.getLogger(__name__)


class Readiness:
    """Checks the readiness of one engine and its scheduler."""

    def __init__(self, engine: Engine, scheduler: Scheduler) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._probe: Sequence | None = None
        self._logged = ""

    def check(self) -> bool:
        """Return whether the model is ready; log each change of the reason."""
        problem = self._scheduler.problem()
        if problem != self._logged:
            self._logged = problem
            if problem:
                _log.error("the model isn't ready: %s", problem)
            else:
                _log.info("the model is ready again")
        if self._scheduler.failing and (self._probe is None or self._probe.status is Status.FINISHED):
            self._probe = self._engine.builder.build(_PROBE)
            self._scheduler.add([self._probe])
        return not problem
