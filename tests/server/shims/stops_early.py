"""The model that is told to unload while rows run and wait, which this Triton itself never does."""

from __future__ import annotations

import threading
from typing import Any

import real_model  # type: ignore[import-not-found]  # the name that model.py has beside a shim


class TritonPythonModel(real_model.TritonPythonModel):  # type: ignore[misc]  # as above
    """Unloads itself as soon as a request with "stop now" in its prompt waits for a slot."""

    def initialize(self, args: dict[str, str]) -> None:
        super().initialize(args)
        self._stopped = threading.Lock()

    def execute(self, requests: list[Any]) -> object:
        prompts = [request.inputs()[0].as_numpy()[0, 0] for request in requests]
        if any(b"stop now" in prompt for prompt in prompts):
            threading.Thread(target=self._finalize_when_somebody_waits).start()
        return super().execute(requests)

    def finalize(self) -> None:
        if self._stopped.acquire(blocking=False):
            super().finalize()

    def _finalize_when_somebody_waits(self) -> None:
        scheduler = self._scheduler
        with scheduler._changed:
            scheduler._changed.wait_for(lambda: scheduler._waiting)
        self.finalize()
