"""The Triton of one entry of the settings, and the model that it describes.

It is asked for the description until the first one comes, then once a minute, with the digest of the last one, and when
another model may be served.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress

from triton_llama.address import ServerAddress
from triton_llama.errors import TritonLlamaError

from triton_llama_openai.errors import ApiError
from triton_llama_openai.prompt.tokenizer import UnusableCheckpointError
from triton_llama_openai.served.served_model import ServedModel
from triton_llama_openai.settings import ModelSettings
from triton_llama_openai.triton.description import Adapter
from triton_llama_openai.triton.triton_client import TritonClient
from triton_llama_openai.triton_load import TritonLoad, TritonLoadReader

LOG = logging.getLogger("triton_llama_openai")
_PROBE_S = 2.0
_DESCRIPTION_TIMEOUT_S = 60.0
"""A description waits in Triton's queue as every request does."""
_CHECK_S = 60.0
"""Seconds between two requests for the description without a sign of an exchange."""
_PAUSE_S = 1.0
"""Seconds between two other requests for it."""


class TritonModel:
    """One model of the settings, in its Triton.

    metrics: addresses of Triton's metrics. template: the operator's chat template.
    """

    def __init__(
        self, settings: ModelSettings, server: ServerAddress, metrics: Sequence[str], template: str | None
    ) -> None:
        self._settings = settings
        self._template = template
        self.triton = TritonClient(server, settings.triton_model)
        self._load_readers = [TritonLoadReader(address, settings.triton_model) for address in metrics]
        self.described: ServedModel | None = None
        """The model that is served now; None before the first description, and for one that can't be used."""
        self._reason = "its description hasn't come yet"
        """Reason why `described` is None."""
        self._digest = ""
        """Of the last description; empty before the first one."""
        self._task: asyncio.Task[None] | None = None
        self._answered = asyncio.Event()
        """Set once the running request for the description, or the next one, has an answer or has failed."""
        self._answered_at = -math.inf
        """Time of the last answer or failure."""

    @property
    def name(self) -> str | None:
        """The name that requests give; None before a description without the setting `served_name`."""
        return self._settings.served_name or (None if self.described is None else self.described.name)

    @property
    def label(self) -> str:
        """The name, or that of the model in Triton before there is one."""
        return self.name or self._settings.triton_model

    @property
    def model(self) -> ServedModel:
        """The model that is served now. Raises ApiError 503 if there is none."""
        if self.described is None:
            raise ApiError(503, f"{self.label} is not served yet: {self._reason}", None, "engine_unavailable")
        return self.described

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The loaded adapters by name, without one of the model's name, which requests can't give."""
        return {name: adapter for name, adapter in self.triton.adapters.items() if name != self.name}

    @property
    def names(self) -> list[str]:
        """The names that requests give: the model's, if it is known, and its adapters'."""
        return [*filter(None, [self.name]), *self.adapters]

    def find(self, name: str) -> ServedModel:
        """Return the model or its adapter of one of the `names`. Raises ApiError 503 before the description."""
        adapter = self.adapters.get(name)
        return self.model if adapter is None else self.model.with_adapter(adapter)

    @property
    def served(self) -> list[ServedModel]:
        """The model and its adapters; empty if there is no model now."""
        model = self.described
        return [] if model is None else [model, *map(model.with_adapter, self.adapters.values())]

    def triton_loads(self) -> dict[int, TritonLoad]:
        """Return the loads of its Tritons by number, at most 0.5 s old, without those that aren't known."""
        return {number: load for number, reader in enumerate(self._load_readers) if (load := reader.load()) is not None}

    async def start(self, seconds: float) -> None:
        """Ask for the description from now on; return after the first attempt, or after this time."""
        self._task = asyncio.create_task(self._follow())
        await self.refresh(seconds)

    async def refresh(self, seconds: float) -> None:
        """Ask for the description, unless the last answer is newer than `_PAUSE_S`; return after the answer, or after
        this time."""
        if time.monotonic() - self._answered_at < _PAUSE_S:
            return
        self.triton.doubt.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._answered.wait()

    async def close(self) -> None:
        """Close the connection."""
        # First: Triton may end at the same time, and its missing page is no warning then.
        for reader in self._load_readers:
            reader.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.triton.close()

    async def why_not_ready(self) -> str | None:
        """Return why the model can't answer now, None if it can."""
        if self.described is None:
            return self._reason
        try:
            ready = await self.triton.is_ready(_PROBE_S)
        except TritonLlamaError as error:
            return str(error)
        return None if ready else f"the model {self.triton.model} of {self.triton.server} is not ready"

    async def _follow(self) -> None:
        """Ask for the description until the endpoint ends."""
        while True:
            self.triton.doubt.clear()
            try:
                await self._fetch_description()
            except Exception as error:  # noqa: BLE001  without this task an exchanged model would not be noticed
                self.triton.doubt.set()
                if not self._digest and str(error) != self._reason:
                    self._reason = str(error)
                    LOG.warning("%s is not served yet: %s", self.label, error)
            self._answered.set()
            self._answered, self._answered_at = asyncio.Event(), time.monotonic()
            await asyncio.sleep(_PAUSE_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_S):
                    await self.triton.doubt.wait()

    async def _fetch_description(self) -> None:
        """Ask for the description and serve by it; requests that have begun keep the model that they began with."""
        description = await self.triton.description(self._digest, _DESCRIPTION_TIMEOUT_S)
        if description is None:
            return
        try:
            # In a thread: a large tokenizer takes a second.
            self.described = await asyncio.to_thread(
                ServedModel.of, description, self._settings, self._template, self.triton
            )
        except UnusableCheckpointError as error:
            self.described, self._reason = None, str(error)
            LOG.error("%s is not served: %s", self.label, error)
        self._digest = description.digest
