"""A cell of the matrix: one server, one situation, one stop, and what became of every accepted request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from server.stops.outcomes import Outcome
from server.stops.scene import CellError, NotTogetherError, Scene
from server.stops.situations import Situation
from server.stops.stops import STOP_S, ModelHeldError, Stop

CONFIGS = ("default", "streaming")
TRIES = 3
"""To see a situation's requests together, with a new server each."""
ENDS_S = 20.0
"""For the clients to notice that a stop is over."""


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


async def run(stop: Stop[Any], situation: Situation, config: str) -> Cell:
    """Run one cell. Raises CellError if the situation doesn't come about; a stop that hangs is one of its failures."""
    for tries_left in reversed(range(TRIES)):
        with TemporaryDirectory(prefix="triton-llama-stop-") as folder:
            host = stop.host(config, Path(folder))
            try:
                await host.start()
                async with Scene(host.addresses, config == "streaming", stop.network_ends) as scene:
                    load = await _enter(situation, scene)
                    return await _stopped(stop, host, scene, load)
            except NotTogetherError:
                if not tries_left:
                    raise
            finally:
                await host.end()
    raise AssertionError("unreachable")


async def _enter(situation: Situation, scene: Scene) -> tuple[int, int]:
    try:
        await situation.enter(scene)
        return await scene.wait_until_accepted(situation.running, situation.waiting)
    except NotTogetherError as error:
        if losses := scene.lost():
            raise CellError(f"before the stop: {'; '.join(losses)}") from error
        raise


async def _stopped(stop: Stop[Any], host: Any, scene: Scene, load: tuple[int, int]) -> Cell:  # noqa: ANN401 - the stop's own
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
    seconds = round(time.monotonic() - began, 1)
    scene.stopped.set()
    outcomes, losses = await scene.ends(ENDS_S)
    failures += [f"exit code {code}"] if code else []
    failures += losses
    counts = {str(outcome): outcomes[outcome] for outcome in Outcome if outcomes[outcome]}
    log = host.log() if failures else ""
    return Cell(outcomes.total(), *load, counts, code, held, seconds, failures, log)
