"""Which of a model's Tritons answers a request: the one that may have the prompt's prefix cached, or the least busy."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection, Sequence

from triton_llama_openai.triton.engine_client import EngineClient
from triton_llama_openai.triton.replica import Replica

MARGIN = 4
"""Requests that a prefix's home may have more than the least busy replica."""


class LoadBalancer:
    """The replicas of one model, in the order of the setting `triton`.

    hang_timeout, before_return: as for `Replica`.
    """

    def __init__(
        self,
        engines: Sequence[EngineClient],
        hang_timeout: float,
        before_return: Callable[[Replica], Awaitable[None]],
    ) -> None:
        self._available = asyncio.Event()
        self.replicas = [Replica(engine, hang_timeout, before_return, self._available.set) for engine in engines]
        self.digest = ""
        """Of the description by which requests are prepared; empty before the first one."""
        self.doubt = asyncio.Event()
        """Set when the model may have been exchanged."""
        self.closed = False

    def pick(self, key: str, refused: Collection[Replica] = ()) -> Replica | None:
        """Return the replica for a request, None if all are out or have refused it."""
        replicas = [replica for replica in self.replicas if replica.error is None and replica not in refused]
        if not replicas:
            return None
        # Rendezvous hashing: a replica that leaves moves its own prefixes only.
        home = max(replicas, key=lambda replica: _weight(key, replica))
        least_busy = min(replicas, key=lambda replica: replica.running)
        return least_busy if home.running > least_busy.running + MARGIN else home

    async def wait(self, seconds: float) -> None:
        """Wait until a replica takes requests again, or for this time."""
        self._available.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._available.wait()
        except TimeoutError:
            return

    async def close(self) -> None:
        """Close every connection."""
        self.closed = True
        self._available.set()
        for replica in self.replicas:
            await replica.close()


def _weight(key: str, replica: Replica) -> bytes:
    return hashlib.blake2b(replica.name + b"\0" + key.encode(), digest_size=8).digest()
