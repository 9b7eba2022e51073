"""The model whose steps hang for as long as the file that STUCK_WHILE names exists."""

from __future__ import annotations

import os
import time
from pathlib import Path

import real_model  # type: ignore[import-not-found]  # the name that model.py has beside a shim
from llama_engine.engine import Engine, StepResult


class StuckEngine(Engine):
    """An engine that doesn't begin a step while the file exists."""

    def step(self) -> StepResult:
        while Path(os.environ["STUCK_WHILE"]).exists():
            time.sleep(0.01)
        return super().step()


TritonPythonModel = real_model.TritonPythonModel
real_model.Engine = StuckEngine
