"""Requests that load or unload a LoRA adapter, each in a thread of its own, while the engine computes others."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from pathlib import Path

from llama_engine.engine.adapters import Adapters, folder_inside
from llama_engine.engine.dispatcher import ResponseDispatcher
from llama_engine.engine.scheduler import Scheduler
from llama_engine.errors import CheckpointError, GenerationError, InvalidRequest, QueueFull, RequestError, Stopping
from llama_engine.observability.stats import Stats
from llama_engine.request.adapter_choice import Adapter, AdapterCommand, adapters_json
from llama_engine.request.parameters import LORA_PATH
from llama_engine.triton.responder import Responder

MAX_RUNNING = 16
"""Commands at a time: each has a thread, and an unload can wait for a long sequence."""

_FAILURE = "the adapter could not be loaded or unloaded; the server's log has the reason"

_log = logging.getLogger(__name__)


class AdapterCommands:
    """The commands of one engine, for the thread that reads its requests."""

    def __init__(
        self, adapters: Adapters, folder: str | None, scheduler: Scheduler, dispatcher: ResponseDispatcher, stats: Stats
    ) -> None:
        """folder: in which the adapters are, the setting `lora_folder`; None or empty refuses all commands."""
        self._adapters, self._folder = adapters, folder
        self._scheduler, self._dispatcher, self._stats = scheduler, dispatcher, stats
        # Added commands wait for their adapter to unload; None loads.
        self._added: list[tuple[Future[Adapter | None], Adapter | None]] = []
        # Guards the responders of commands that run, so that each command is answered once.
        self._lock = threading.Lock()
        self._running: dict[Responder, threading.Thread] = {}
        stats.record_adapters(len(adapters.loaded()))

    def add(self, command: AdapterCommand, responder: Responder) -> None:
        """Add a command for `start`. Later requests can't name an adapter that it unloads.

        Raises InvalidRequest, QueueFull if MAX_RUNNING commands run, and GenerationError if no thread can be started.
        """
        if not self._folder:
            raise InvalidRequest(f"{LORA_PATH} is given; it must be missing: the setting lora_folder is off")
        scheduled: Future[Adapter | None] = Future()
        # A temporary thread: PyTorch keeps an OpenMP pool for every thread that has computed.
        arguments = (command, scheduled, Path(self._folder), responder)
        thread = threading.Thread(target=self._run, args=arguments, name="adapters", daemon=True)
        with self._lock:
            if len(self._running) >= MAX_RUNNING:
                raise QueueFull(f"{MAX_RUNNING} requests with {LORA_PATH} are running; try again later")
            try:
                # Start it before the adapter is removed, which can't be undone.
                thread.start()
            except RuntimeError as error:
                _log.exception("no thread for request %s", responder.name)
                raise GenerationError(_FAILURE) from error
            self._running[responder] = thread
        try:
            self._added.append((scheduled, None if command.path else self._adapters.remove(command.name)))
        except InvalidRequest as error:
            scheduled.set_exception(error)

    def start(self) -> None:
        """Start the added commands. The sequences of all requests read before must have been scheduled."""
        added, self._added = self._added, []
        for scheduled, removed in added:
            scheduled.set_result(removed)

    def close(self, timeout: float) -> None:
        """Wait for running commands, up to `timeout` seconds, and refuse the others; the scheduler has been stopped."""
        self._adapters.stop()
        deadline = time.monotonic() + timeout
        with self._lock:
            threads = [*self._running.values()]
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
        with self._lock:
            unanswered = [*self._running]
        for responder in unanswered:
            self._answer(responder, Stopping())

    def _run(
        self, command: AdapterCommand, scheduled: Future[Adapter | None], folder: Path, responder: Responder
    ) -> None:
        try:
            removed = scheduled.result()
            if removed is None:
                self._load(command, folder_inside(folder, command.path))
            else:
                self._scheduler.wait_until_unused(removed)
                self._adapters.free(removed)
        except (InvalidRequest, Stopping) as error:
            self._answer(responder, error)
        except Exception:  # noqa: BLE001 - any failure: the client must get a response
            _log.exception("request %s: adapter %s could not be loaded or unloaded", responder.name, command.name)
            self._answer(responder, GenerationError(_FAILURE))
        else:
            self._answer(responder)

    def _load(self, command: AdapterCommand, folder: Path) -> None:
        try:
            self._adapters.load(command.name, command.number, folder)
        except CheckpointError as error:
            # Clients don't learn where the server's folders are.
            message = str(error).replace(str(folder), folder.name)
            raise InvalidRequest(f"{LORA_PATH} is ", repr(command.path), f": {message}") from error

    def _answer(self, responder: Responder, error: RequestError | None = None) -> None:
        """Send the loaded adapters, or an error; nothing if the request has been answered."""
        with self._lock:
            if self._running.pop(responder, None) is None:
                return
            loaded = self._adapters.loaded()
            self._stats.record_adapters(len(loaded))
            if error is None:
                responder.text = adapters_json(loaded)
            else:
                self._stats.record_refused(error)
                responder.refuse(error)
            self._dispatcher.wake(responder)
