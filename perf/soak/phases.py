"""The phases of a soak's load, which all users follow."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["steady", "burst", "rest", "over"]


@dataclass
class Phases:
    """The present phase of the load. thinking_seconds: mean pause of a user before an action in the steady phase."""

    thinking_seconds: float
    phase: Phase = "rest"
    _active: asyncio.Event = field(default_factory=asyncio.Event)

    def change(self, phase: Phase) -> None:
        """Begin a phase."""
        self.phase = phase
        if phase == "rest":
            self._active.clear()
        else:
            self._active.set()

    async def wait(self, randomness: random.Random) -> bool:
        """Wait until the user may act, and return True; False once the load is over."""
        while True:
            await self._active.wait()
            if self.phase == "steady":
                await asyncio.sleep(randomness.expovariate(1 / self.thinking_seconds))
            # The phase may have changed during the pause.
            if self.phase != "rest":
                return self.phase != "over"
