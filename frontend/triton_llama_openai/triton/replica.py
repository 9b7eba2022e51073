"""One of the Tritons that serve a model: the requests that run there, and whether it takes new ones.

A replica that fails is out until it generates a token again: a model whose process hangs, and on Triton 2.51 one whose
process died, stays ready.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager

from triton_llama.errors import LlamaConnectionError, TritonLlamaError
from triton_llama.tensors import Tensor

from triton_llama_openai.triton.engine_client import EngineClient

LOG = logging.getLogger("triton_llama_openai")
_INTERVAL_S = 0.5
"""Between two probes of a replica that is out, and between two looks at one where requests run."""
_PROBE_S = 10.0
"""Timeout of a probe, in seconds."""
_QUIET_S = 5.0
"""Seconds of silence before a readiness check of a Triton where requests run."""
_ONE_TOKEN = (
    Tensor("text_input", "BYTES", ("a",)),
    Tensor("max_tokens", "INT32", (1,)),
    Tensor("priority", "INT32", (-(2**31),)),
)


class Replica:
    """One Triton. hang_timeout: seconds without a response, until its model counts as hung; 0: never.

    before_return: called when it can take requests again; an error keeps it out. on_return: called when it takes them.
    """

    def __init__(
        self,
        engine: EngineClient,
        hang_timeout: float,
        before_return: Callable[[Replica], Awaitable[None]],
        on_return: Callable[[], None],
    ) -> None:
        self.engine = engine
        self.name = engine.endpoint.authority.encode()
        """Its address; prefixes are distributed by it."""
        self.running = 0
        """Requests in flight here."""
        self.digest = ""
        """Of the description that its model gave last."""
        # A text: an error would hold its traceback, and so the failed call and its channel.
        self.error: str | None = None
        """Why it takes no requests; None while it does."""
        self._hang_timeout = hang_timeout
        self._before_return = before_return
        self._on_return = on_return
        self._watcher: asyncio.Task[None] | None = None
        self._failed_at = 0.0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while it runs here."""
        self.running += 1
        self._watch()
        try:
            yield
        finally:
            self.running -= 1

    def fail(self, error: TritonLlamaError) -> None:
        """Take it out, until a probe generates a token."""
        self.error, self._failed_at = str(error), time.monotonic()
        self._watch()

    async def close(self) -> None:
        """End the probes and the connection."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self.engine.close()

    def _watch(self) -> None:
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._look())

    async def _look(self) -> None:
        """Probe while it is out; while requests run, notice that it is gone or hangs."""
        while self.running or self.error is not None:
            await asyncio.sleep(_INTERVAL_S)
            try:
                if self.error is None:
                    await self._check()
                elif self._goes_on() or await self._generates():
                    await self._before_return(self)
                    LOG.info("%s takes requests again", self.engine.endpoint)
                    self.error = None
                    self._on_return()
            except TritonLlamaError as error:
                self.error = str(error)
            except Exception:
                # Without this task a replica that is out would stay out.
                LOG.exception("the probe of %s failed", self.engine.endpoint)

    def _goes_on(self) -> bool:
        """Return whether requests that ran here when one failed have got tokens since."""
        return self.engine.last_response > self._failed_at + _INTERVAL_S

    async def _generates(self) -> bool:
        if not await self.engine.is_ready(_PROBE_S):
            return False
        async with aclosing(self.engine.stream(_ONE_TOKEN, "probe", range(1), _PROBE_S, "")) as responses:
            async for _ in responses:
                pass
        return True

    async def _check(self) -> None:
        """Interrupt the requests that run here if the model hangs, or Triton doesn't answer."""
        if not self._hang_timeout:
            return
        if self.engine.silence() >= self._hang_timeout:
            try:
                # A stream is also silent while its text is held back.
                alive = await self._generates()
            except TritonLlamaError:
                alive = False
            if not alive:
                await self._interrupt(f"the model has sent nothing for {self._hang_timeout:g} s")
        elif self.running and time.monotonic() - self.engine.last_heard >= _QUIET_S:
            try:
                await self.engine.is_ready(_PROBE_S)
            except TritonLlamaError as error:
                await self._interrupt(f"Triton doesn't answer: {error}")

    async def _interrupt(self, reason: str) -> None:
        self.fail(LlamaConnectionError(f"no connection to {self.engine.endpoint}: {reason}"))
        await self.engine.disconnect(reason)
