"""Requests that load or unload a LoRA adapter, each in a thread of its own, while the engine computes others."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from llama_engine.engine.adapters import Adapters, folder_inside
from llama_engine.engine.dispatcher import ResponseDispatcher
from llama_engine.engine.scheduler import Scheduler
from llama_engine.errors import CheckpointError, GenerationError, InvalidRequest, RequestError, Stopping
from llama_engine.observability.stats import Stats
from llama_engine.request.adapters import Adapter, AdapterCommand, adapters_json
from llama_engine.request.parameters import LORA_PATH
from llama_engine.triton.response import Response

_FAILURE = "the adapter could not be loaded or unloaded; the server's log has the reason"

_log = logging.getLogger(__name__)


class AdapterCommands:
    """The commands of one engine, for the thread that decodes its requests."""

    def __init__(
        self, adapters: Adapters, folder: str | None, scheduler: Scheduler, dispatcher: ResponseDispatcher, stats: Stats
    ) -> None:
        """folder: in which the adapters are, the setting `lora_folder`; None or empty refuses all commands."""
        self._adapters, self._folder = adapters, folder
        self._scheduler, self._dispatcher, self._stats = scheduler, dispatcher, stats
        self._added: list[threading.Thread] = []
        self._running: list[threading.Thread] = []
        stats.record_adapters(len(adapters.loaded()))

    def add(self, command: AdapterCommand, response: Response) -> None:
        """Add a command for `start`. Later requests can't name an adapter that it unloads. Raises InvalidRequest."""
        if not self._folder:
            raise InvalidRequest(f"{LORA_PATH} is given; it must be missing: the setting lora_folder is off")
        removed = None if command.path else self._adapters.remove(command.name)
        # A temporary thread: PyTorch keeps an OpenMP pool for every thread that has computed.
        arguments = (command, removed, Path(self._folder), response)
        self._added.append(threading.Thread(target=self._run, args=arguments, name="adapters", daemon=True))

    def start(self) -> None:
        """Start the added commands. The sequences of all requests decoded before must have been scheduled."""
        added, self._added = self._added, []
        self._running = [thread for thread in self._running if thread.is_alive()] + added
        for thread in added:
            thread.start()

    def close(self, timeout: float) -> None:
        """Wait for running commands, up to `timeout` seconds; the scheduler must have been stopped."""
        deadline = time.monotonic() + timeout
        for thread in self._running:
            thread.join(max(deadline - time.monotonic(), 0))

    def _run(self, command: AdapterCommand, removed: Adapter | None, folder: Path, response: Response) -> None:
        try:
            if removed is None:
                self._load(command, folder_inside(folder, command.path))
            else:
                self._scheduler.wait_until_unused(removed)
                self._adapters.free(removed)
        except (InvalidRequest, Stopping) as error:
            self._refuse(response, error)
        except Exception:  # noqa: BLE001 - any failure: the client must get a response
            _log.exception("request %s: adapter %s could not be loaded or unloaded", response.name, command.name)
            self._refuse(response, GenerationError(_FAILURE))
        else:
            loaded = self._adapters.loaded()
            self._stats.record_adapters(len(loaded))
            response.text = adapters_json(loaded)
            self._dispatcher.post_again(response)

    def _load(self, command: AdapterCommand, folder: Path) -> None:
        try:
            self._adapters.load(command.name, command.number, folder)
        except CheckpointError as error:
            # Clients don't learn where the server's folders are.
            message = str(error).replace(str(folder), folder.name)
            raise InvalidRequest(f"{LORA_PATH} is ", repr(command.path), f": {message}") from error

    def _refuse(self, response: Response, error: RequestError) -> None:
        self._stats.record_refused(error)
        response.refuse(error)
        self._dispatcher.post([(response, error)])
