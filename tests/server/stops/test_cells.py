"""A situation that didn't come about is entered again, without what the try before has sent."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest
from server.stops.cells import TRIES, enter
from server.stops.outcomes import End, Outcome
from server.stops.scene import Addresses, CellError, Load, Scene
from server.stops.situations import Situation


class _Scene(Scene):
    """A scene whose server runs what is set here, and has ended the rest of what was sent."""

    runs = 0

    def _metrics(self) -> dict[str, float]:
        # Once its client has cancelled a request, the server ends it.
        runs = min(self.runs, sum(not request.task.done() for request in self.requests))
        ended = len(self.requests) - runs
        return defaultdict(float, {"llama_slots_in_use": runs, "llama_requests_total": ended})


class _Entered:
    """A situation of two requests, of which as many run as this try is to see."""

    def __init__(self, running: list[int], first: Outcome = Outcome.COMPLETE) -> None:
        self._running = iter(running)
        self._first = first
        self.sent: list[asyncio.Task[End]] = []

    async def enter(self, scene: Scene) -> None:
        assert isinstance(scene, _Scene)
        scene.runs = next(self._running)
        ending = [scene.add("one that ends", self._ended()) for _ in range(2 - scene.runs)]
        running = [scene.add("one that runs", _endless()) for _ in range(scene.runs)]
        scene.at_stop.append(lambda: None)
        self.sent += [request.task for request in ending + running]
        await asyncio.gather(*(request.task for request in ending))

    async def _ended(self) -> End:
        return End(self._first, "said")


async def _endless() -> End:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def _scene() -> _Scene:
    return _Scene(Addresses("", "", ""), streams=True)


@pytest.mark.parametrize("running", [[2], [0, 2], [0, 0, 2]])
async def test_a_situation_whose_requests_had_ended_is_entered_again(running: list[int]) -> None:
    situation = _Entered(running)
    async with _scene() as scene:
        assert await enter(Situation(situation.enter, running=2), scene) == Load(2, 0)
        assert [request.task for request in scene.requests] == situation.sent[-2:]
        assert len(situation.sent) == 2 * len(running)
        assert len(scene.at_stop) == 1
        assert all(task.done() for task in situation.sent[:-2])
        assert not any(task.done() for task in situation.sent[-2:])


async def test_a_situation_that_never_comes_about_is_an_error() -> None:
    situation = _Entered([0] * (TRIES + 1))
    async with _scene() as scene:
        with pytest.raises(CellError, match="0 run, 0 wait and 2 of 2 have ended, instead of 2 and any"):
            await enter(Situation(situation.enter, running=2), scene)
    assert len(situation.sent) == 2 * TRIES


async def test_a_request_that_is_lost_before_the_stop_isnt_tried_again() -> None:
    situation = _Entered([0, 2], first=Outcome.LOST)
    async with _scene() as scene:
        with pytest.raises(CellError, match="before the stop: 2 x one that ends lost, the first: said"):
            await enter(Situation(situation.enter, running=2), scene)
    assert len(situation.sent) == 2
