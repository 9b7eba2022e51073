"""The Tritons of one entry of the settings, and the model that they describe.

They are asked for the description until the first one comes, then once a minute, with the digest of the last one, and
whenever the model may have been exchanged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from triton_llama.endpoint import Endpoint
from triton_llama.errors import LlamaConnectionError, TritonLlamaError

from triton_llama_openai.errors import ApiError
from triton_llama_openai.metrics import EngineLoad
from triton_llama_openai.prompt.tokenizer import UnusableCheckpointError
from triton_llama_openai.routes.served_model import ServedModel
from triton_llama_openai.settings import ModelSettings
from triton_llama_openai.triton.description import Description
from triton_llama_openai.triton.engine_client import EngineClient
from triton_llama_openai.triton.engine_load import MetricsPage, load_of_all
from triton_llama_openai.triton.load_balancer import LoadBalancer
from triton_llama_openai.triton.replica import Replica

LOG = logging.getLogger("triton_llama_openai")
_PROBE_S = 2.0
_DESCRIPTION_TIMEOUT_S = 60.0
"""A description waits in Triton's queue as every request does."""
_CHECK_S = 60.0
"""Seconds between two requests for the description without a sign of an exchange."""
_PAUSE_S = 1.0
"""Seconds between two other requests for it."""


class Backend:
    """One model of the settings. metrics: address of each Triton's metrics. template: the operator's chat template."""

    def __init__(
        self,
        settings: ModelSettings,
        endpoints: Sequence[Endpoint],
        metrics: Sequence[str],
        hang_timeout: float,
        template: str | None,
    ) -> None:
        self._settings = settings
        self._template = template
        engines = [EngineClient(endpoint, settings.model) for endpoint in endpoints]
        self._balancer = LoadBalancer(engines, hang_timeout, self._describe)
        self._metrics_pages = [MetricsPage(address, settings.model) for address in metrics]
        self.described: ServedModel | None = None
        """The model that is served now; None before the first description, and for one that can't be used."""
        self._reason = "its description hasn't come yet"
        """Reason why `described` is None."""
        self._adopting = asyncio.Lock()
        self._differ = False
        self._tasks: list[asyncio.Task[None]] = []
        self._looked = asyncio.Event()

    @property
    def name(self) -> str | None:
        """The name that requests give; None before a description without the setting `served_name`."""
        described = None if self.described is None else self.described.name
        return self._settings.served_name or described

    @property
    def label(self) -> str:
        """The name, or that of the model in Triton before there is one."""
        return self.name or self._settings.model

    @property
    def model(self) -> ServedModel:
        """The model that is served now. Raises ApiError 503 if there is none."""
        if self.described is None:
            raise ApiError(503, f"{self.label} is not served yet: {self._reason}", None, "engine_unavailable", 1)
        return self.described

    def load(self) -> EngineLoad | None:
        """Return the load of its Tritons, at most 0.5 s old; None if it isn't known."""
        return load_of_all(self._metrics_pages)

    async def start(self, seconds: float) -> None:
        """Ask for the description from now on; return after the first attempt, or after this time."""
        watches = [self._watch_connection(replica) for replica in self._balancer.replicas]
        self._tasks = [asyncio.create_task(task) for task in (self._look(), *watches)]
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._looked.wait()

    async def close(self) -> None:
        """Close every connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._balancer.close()
        for page in self._metrics_pages:
            page.close()

    async def why_not_ready(self) -> str | None:
        """Return why none of its Tritons can answer now, None if one can."""
        if self.described is None:
            return self._reason
        reasons = await asyncio.gather(*(_why_not_ready(replica.engine) for replica in self._balancer.replicas))
        return None if None in reasons else "; ".join(filter(None, reasons))

    async def _look(self) -> None:
        """Ask for the description until the endpoint ends."""
        while True:
            self._balancer.doubt.clear()
            replicas = self._balancer.replicas
            await self._ask([replica for replica in replicas if replica.error is None] or replicas)
            self._looked.set()
            await asyncio.sleep(_PAUSE_S)
            if self._balancer.digest:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_CHECK_S):
                        await self._balancer.doubt.wait()

    async def _watch_connection(self, replica: Replica) -> None:
        """Ask when the connection was lost: the server that is found next may be another one."""
        while True:
            await replica.engine.until_lost()
            await self._ask([replica])

    async def _ask(self, replicas: Sequence[Replica]) -> None:
        results = await asyncio.gather(*map(self._describe, replicas), return_exceptions=True)
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, LlamaConnectionError):
                # It takes no request before it has said what it serves now; the others may serve another model.
                replica.fail(result)
                self._balancer.doubt.set()
            elif isinstance(result, Exception) and self._balancer.digest:
                LOG.warning("%s: %s wasn't asked what it serves: %s", self.label, replica.engine.endpoint, result)
        reason = "; ".join(str(result) for result in results if result is not None)
        if not self._balancer.digest and reason != self._reason:
            self._reason = reason
            LOG.warning("%s is not served yet: %s", self.label, reason)

    async def _describe(self, replica: Replica) -> None:
        """Ask a replica for its description; serve by it once no working replica has the one in use."""
        known = self._balancer.digest
        description = await replica.engine.description(known, _DESCRIPTION_TIMEOUT_S)
        replica.digest = known if description is None else description.digest
        async with self._adopting:
            in_use = self._balancer.digest
            if description is None or description.digest == in_use:
                return
            if in_use and any(other.error is None and other.digest == in_use for other in self._balancer.replicas):
                self._warn_of_difference()
            else:
                await self._adopt(description)

    def _warn_of_difference(self) -> None:
        if not self._differ:
            self._differ = True
            message = "%s: the model's descriptions differ between its Tritons; an interrupted answer may, too"
            LOG.warning(message, self.label)

    async def _adopt(self, description: Description) -> None:
        """Serve by a description; requests that have begun keep the model that they began with."""
        try:
            # In a thread: a large tokenizer takes a second.
            self.described = await asyncio.to_thread(
                ServedModel.of, description, self._settings, self._template, self._balancer
            )
        except UnusableCheckpointError as error:
            self.described, self._reason = None, str(error)
            LOG.error("%s is not served: %s", self.label, error)
        self._balancer.digest = description.digest
        self._differ = False


async def _why_not_ready(engine: EngineClient) -> str | None:
    try:
        ready = await engine.is_ready(_PROBE_S)
    except TritonLlamaError as error:
        return str(error)
    return None if ready else f"the model {engine.model} of {engine.endpoint} is not ready"
