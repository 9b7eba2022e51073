"""Whether users act just now, and how eagerly: steady, a burst, a rest, and in the end over.

Whoever conducts the soak sets it; the users ask before each action.
"""

from __future__ import annotations

import asyncio
import random
from typing import Literal

Phase = Literal["steady", "burst", "rest", "over"]


class Weather:
    """The present phase, at first a rest. For one event loop."""

    def __init__(self, thinking_seconds: float) -> None:
        """thinking_seconds: of a user before an action in steady weather, on average."""
        self._thinking = thinking_seconds
        self._phase: Phase = "rest"
        self._changed = asyncio.Condition()

    @property
    def phase(self) -> Phase:
        """What it is now."""
        return self._phase

    async def change(self, phase: Phase) -> None:
        """Let it be that from now on."""
        async with self._changed:
            self._phase = phase
            self._changed.notify_all()

    async def lets_act(self, randomness: random.Random) -> bool:
        """Wait until this user may act, which it must do at once; False when all is over."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._phase != "rest")
            if self._phase == "steady":
                await asyncio.sleep(randomness.expovariate(1 / self._thinking))
            # It may have changed meanwhile.
            if self._phase != "rest":
                return self._phase != "over"
