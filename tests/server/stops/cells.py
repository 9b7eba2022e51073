"""A cell of the matrix: one server, one situation, one stop, and what became of every accepted request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from server.stops.outcomes import Outcome
from server.stops.scene import CellError, Load, Scene
from server.stops.situations import Situation
from server.stops.stops import STOP_S, ModelHeldError, Stop

CONFIGS = ("default", "streaming")
ENDS_S = 20.0
"""For the clients to notice that a stop is over."""

TRIES = 3
"""To see a situation's requests together: the demo model may have answered them before."""


@dataclass(frozen=True)
class Cell:
    """accepted: requests. running, waiting: of them, just before the stop. code: None where the server goes on.
    held: whether Triton keeps the model for a stream that its client hasn't closed.

    seconds: from the signal, or the order, until the processes are gone, or the model unloaded. failures: in a line
    each; none if the cell holds. log: the end of the server's, if it doesn't.
    """

    accepted: int
    running: int
    waiting: int
    outcomes: Mapping[str, int]
    code: int | None
    held: bool
    seconds: float
    failures: list[str]
    log: str = ""

    def measurement(self) -> dict[str, Any]:
        """Return it as JSON, without the log."""
        return {name: value for name, value in asdict(self).items() if name != "log"}


async def run(stop: Stop[Any], situation: Situation, config: str) -> Cell:
    """Run one cell. Raises CellError if the situation doesn't come about; a stop that hangs is one of its failures."""
    with TemporaryDirectory(prefix="triton-llama-stop-") as folder:
        host = stop.host(config, Path(folder))
        try:
            await host.start()
            async with Scene(host.addresses, config == "streaming", stop.network_ends) as scene:
                cell = await _stopped(stop, situation, host, scene)
        finally:
            await host.end()
    return cell


async def _stopped(stop: Stop[Any], situation: Situation, host: Any, scene: Scene) -> Cell:  # noqa: ANN401 - the stop's own
    load = await enter(situation, scene)
    failures = []
    code, held = None, False
    for act in scene.at_stop:
        act()
    began = time.monotonic()
    try:
        code = await asyncio.wait_for(stop.stop(host), STOP_S)
    except ModelHeldError:
        held = True
    except TimeoutError:
        failures.append(f"the stop isn't over after {STOP_S:g} s")
    seconds = time.monotonic() - began
    scene.stopped.set()
    outcomes, losses = await scene.ends(ENDS_S)
    if code:
        failures.append(f"exit code {code}")
    counts = {str(outcome): outcomes[outcome] for outcome in Outcome if outcomes[outcome]}
    failures += losses
    log = host.log() if failures else ""
    accepted, seconds = sum(outcomes.values()), round(seconds, 1)
    return Cell(accepted, load.running, load.waiting, counts, code, held, seconds, failures, log)


async def enter(situation: Situation, scene: Scene) -> Load:
    """Enter the situation, again if its requests had ended, or most of them, when they were to be seen together.

    Raises CellError if they had at every try, or if one of them was lost.
    """
    for tries_left in reversed(range(TRIES)):
        try:
            await situation.enter(scene)
            return await scene.wait_until_accepted(situation.running, situation.waiting)
        except CellError as error:
            if not tries_left:
                raise
            if losses := await scene.forget():
                raise CellError(f"before the stop: {'; '.join(losses)}") from error
    raise AssertionError("unreachable")
