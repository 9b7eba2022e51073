"""The LoRA adapters that an engine has loaded, by name: load, unload, list."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from llama_engine.checkpoint.architecture import Architecture
from llama_engine.checkpoint.hub import resolve_adapter
from llama_engine.checkpoint.lora import read_adapter
from llama_engine.errors import CheckpointError, InvalidRequest, InvalidSettings, Stopping
from llama_engine.kernels.lora_layout import NO_LORAS, LoraLimits
from llama_engine.model.model_runner import ModelRunner
from llama_engine.request.adapter_choice import Adapter
from llama_engine.settings import Settings

DEFAULT_COUNT = 8
"""Room for adapters if they can be loaded at run time."""

_log = logging.getLogger(__name__)


def lora_limits(settings: Settings) -> LoraLimits:
    """Return how many adapters an engine has room for, of which rank.

    Raises InvalidSettings if `max_loras` is less than the number of `lora_adapters`.
    """
    configured = len(settings.lora_adapters or ())
    default = max(configured, DEFAULT_COUNT) if settings.lora_folder else configured
    count = default if settings.max_loras is None else settings.max_loras
    if count < configured:
        raise InvalidSettings(f"max_loras is {count}; it must be at least {configured}, the number of lora_adapters")
    return LoraLimits(count, settings.max_lora_rank) if count else NO_LORAS


def folder_inside(parent: Path, path: str) -> Path:
    """Return a folder by its path, absolute or relative to `parent`, in which it must be, symbolic links resolved.

    Raises InvalidRequest.
    """
    try:
        folder, inside = (parent / path).resolve(), parent.resolve()
        if folder.is_relative_to(inside) and folder.is_dir():
            return folder
    except (OSError, RuntimeError, ValueError):
        # A path that is too long, a loop of links, a null character.
        pass
    raise InvalidRequest("lora_path is ", repr(path), "; it must be a folder inside the setting lora_folder")


class Adapters:
    """The adapters of one engine. Thread-safe."""

    def __init__(self, model: ModelRunner, architecture: Architecture, settings: Settings) -> None:
        """Load the setting's `lora_adapters`. Raises CheckpointError with the name of one that is invalid."""
        self._model, self._architecture, self._limits = model, architecture, lora_limits(settings)
        # Adapters are read one after the other, so that at most one is in memory besides those in the model.
        self._loading = threading.Lock()
        self._stopping = False
        # Guards what follows. It is held briefly, because requests are read meanwhile.
        self._lock = threading.Lock()
        self._by_name: dict[str, Adapter] = {}
        self._free = set(range(1, self._limits.count + 1))
        for name, number, source in settings.lora_adapters or ():
            try:
                self.load(name, number, resolve_adapter(source))
            except CheckpointError as error:
                raise CheckpointError(f"lora_adapters: {name}: {error}") from error

    def loaded(self) -> tuple[Adapter, ...]:
        """Return the adapters that requests can name."""
        with self._lock:
            return tuple(self._by_name.values())

    def load(self, name: str, number: int, folder: Path) -> None:
        """Load the adapter in a folder under a name. number: its `lora_task_id`, 0 for none.

        A loaded adapter of this name and content stays as it is. Nothing has changed after an error:
        CheckpointError, InvalidRequest if another adapter has the name or the number or if there are `max_loras`, and
        Stopping after `stop`.
        """
        with self._loading:
            if self._stopping:
                raise Stopping
            # Before the adapter is read, which takes time and memory.
            with self._lock:
                self._check(name, number)
            weights = read_adapter(folder, self._architecture, self._limits.rank)
            index = self._reserve(name, number, weights.digest)
            if index is None:
                return
            try:
                self._model.loras.load(index, weights)
            except BaseException:
                self._release(index)
                raise
            adapter = Adapter(name, number, weights.digest, weights.rank, index)
            with self._lock:
                self._by_name[name] = adapter
        _log.info("adapter %s loaded: rank %d, digest %s", name, adapter.rank, adapter.digest)

    def stop(self) -> None:
        """Refuse loads that haven't begun to read their adapter."""
        self._stopping = True

    def remove(self, name: str) -> Adapter:
        """Let no further request name an adapter. Raises InvalidRequest if it isn't loaded."""
        with self._lock:
            if name not in self._by_name:
                loaded = ", ".join(self._by_name) or "none"
                raise InvalidRequest(f"lora_name is {name!r}; it must be a loaded adapter's: {loaded}")
            return self._by_name.pop(name)

    def free(self, adapter: Adapter) -> None:
        """Free the memory of a removed adapter, which no sequence has any more: `AdapterCommands` waits for that."""
        self._model.loras.load(adapter.index, None)
        self._release(adapter.index)
        _log.info("adapter %s unloaded", adapter.name)

    def _reserve(self, name: str, number: int, digest: str) -> int | None:
        """Return a free index for a new adapter; None if it is loaded. Raises as `load`."""
        with self._lock:
            present = self._check(name, number)
            if present is not None and present.digest == digest:
                return None
            if present is not None:
                raise InvalidRequest(f"lora_name is {name!r}, which is loaded with other content: unload it first")
            index = min(self._free)
            self._free.remove(index)
            return index

    def _check(self, name: str, number: int) -> Adapter | None:
        """Return the loaded adapter of a name; None if there is none and there is room for it. Raises as `load`."""
        present = self._by_name.get(name)
        if present is not None:
            if number not in (0, present.number):
                bound = f"that of {name!r}, {present.number}: unload it first"
                raise InvalidRequest(f"lora_task_id is {number}; it must be {bound}")
            return present
        if number and any(other.number == number for other in self._by_name.values()):
            raise InvalidRequest(f"lora_task_id is {number}; it must be no loaded adapter's")
        if not self._free:
            advice = "; unload one first" if self._limits.count else ""
            bound = f"max_loras, {self._limits.count}{advice}"
            raise InvalidRequest(f"lora_name is {name!r}, one adapter more than {bound}")
        return None

    def _release(self, index: int) -> None:
        with self._lock:
            self._free.add(index)
