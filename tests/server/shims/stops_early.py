"""A model that is unloaded while rows run and wait, which this Triton never does.

It can be loaded again within its process, under other settings, because a process of its own costs many seconds.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from typing import Any

import real_model  # type: ignore[import-not-found]  # the name that model.py has beside a shim


class TritonPythonModel(real_model.TritonPythonModel):  # type: ignore[misc]  # as above
    """Unloads itself as soon as a request with "stop now" in its prompt waits for a slot.

    A prompt with "begin with LLAMA_NAME=value", with no other request in the model, reloads it first.
    """

    def initialize(self, args: dict[str, str]) -> None:
        super().initialize(args)
        self._args = args
        self._stopped = threading.Lock()
        self._unloaded: list[object] = []

    def execute(self, requests: list[Any]) -> object:
        prompts = [request.inputs()[0].as_numpy()[0, 0].decode() for request in requests]
        for setting in re.findall(r"begin with (\w+)=(\w+)", " ".join(prompts)):
            self._begin(*setting)
        if any("stop now" in prompt for prompt in prompts):
            threading.Thread(target=self._finalize_when_somebody_waits).start()
        return super().execute(requests)

    def finalize(self) -> None:
        if self._stopped.acquire(blocking=False):
            super().finalize()

    def _begin(self, name: str, value: str) -> None:
        self.finalize()
        # Its metrics are the next one's, too: freed, they would vanish from the endpoint.
        self._unloaded.append(self._stats)
        # Or every line would be in the log twice.
        logging.getLogger("llama_engine").handlers.clear()
        os.environ[name] = value
        super().initialize(self._args)
        self._stopped = threading.Lock()

    def _finalize_when_somebody_waits(self) -> None:
        scheduler = self._scheduler
        with scheduler._changed:
            scheduler._changed.wait_for(lambda: scheduler._waiting)
        self.finalize()
