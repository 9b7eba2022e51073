"""The model with slow steps: a test can act while a request runs."""

from __future__ import annotations

import time
from collections.abc import Callable

import real_model  # type: ignore[import-not-found]  # the name that model.py has beside a shim
from llama_engine.engine.engine import Engine
from llama_engine.engine.step_result import StepResult

STEP_SECONDS = 0.01


class SlowEngine(Engine):
    """An engine that waits before each step."""

    def step(self, on_first_tokens: Callable[[], None] = lambda: None) -> StepResult:
        time.sleep(STEP_SECONDS)
        return super().step(on_first_tokens)


TritonPythonModel = real_model.TritonPythonModel
real_model.Engine = SlowEngine
