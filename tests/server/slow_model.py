"""The model with slow steps: a test can act while a request runs, and hold the steps by a file."""

from __future__ import annotations

import time
from pathlib import Path

import real_model  # type: ignore[import-not-found]  # the name that model.py has beside a shim
from llama_engine.engine import Engine, StepResult

STEP_SECONDS = 0.01

HELD = Path(__file__).with_name("held")
"""No step begins while this file exists."""


class SlowEngine(Engine):
    """An engine that waits before each step."""

    def step(self) -> StepResult:
        time.sleep(STEP_SECONDS)
        while HELD.exists():
            time.sleep(STEP_SECONDS)
        return super().step()


TritonPythonModel = real_model.TritonPythonModel
real_model.Engine = SlowEngine
