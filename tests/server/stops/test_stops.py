"""Every accepted request is answered, or its client gets an error, whatever stops the server and whatever it does then.

`make stops` runs every situation before every stop, and docs/operations.md has its table.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from notes import Note
from server.stops.cells import CONFIGS, Cell, run
from server.stops.hosts import Launcher
from server.stops.outcomes import Outcome
from server.stops.situations import OPEN_STREAMS, SITUATIONS, Situation
from server.stops.stops import STOPS, Stop

from perf.report.stops import SITUATIONS as ROWS
from perf.report.stops import STOPS as TITLES

AT_ONCE = 2
"""Servers at the same time: a start is imports on one core, a stop mostly waiting."""


async def _cells(stop: str, cells: list[tuple[Situation, str]]) -> list[Cell]:
    """Run these situations and configs before a stop."""
    free = asyncio.Semaphore(AT_ONCE)

    async def cell(situation: Situation, config: str) -> Cell:
        async with free:
            return await run(STOPS[stop], situation, config)

    return await asyncio.gather(*(cell(*one) for one in cells))


def _check(stop: str, cells: list[Cell], note: Note) -> None:
    assert [(failure, cell.log) for cell in cells for failure in cell.failures] == []
    assert sum(cell.outcomes.get(Outcome.REFUSED, 0) for cell in cells) == 0
    accepted, complete = sum(cell.accepted for cell in cells), sum(cell.outcomes.get("complete", 0) for cell in cells)
    ended = ", ".join(f"code {cell.code} after {cell.seconds:g} s" for cell in cells)
    note(f"{TITLES[stop]}: {accepted} requests accepted, {complete} answered completely, none lost; {ended}")


def test_the_table_has_a_row_for_each_situation_and_a_column_for_each_stop() -> None:
    assert set(ROWS) == set(SITUATIONS)
    assert set(TITLES) == {*STOPS, "docker"}


async def test_sigterm_loses_no_accepted_request_beside_leaked_and_unread_streams(note: Note) -> None:
    _check("sigterm", await _cells("sigterm", [(OPEN_STREAMS, "streaming")]), note)


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stop", STOPS)
async def test_no_accepted_request_is_lost_idle_or_under_load(stop: str, note: Note) -> None:
    cells = [(SITUATIONS[situation], config) for situation in ("idle", "everything") for config in CONFIGS]
    _check(stop, await _cells(stop, cells), note)


@pytest.mark.campaign
async def test_a_server_that_is_killed_is_seen_to_lose_what_it_had_accepted() -> None:
    async def kill(launcher: Launcher) -> int:
        # The kernel kills the server with it.
        os.kill(launcher.guard, signal.SIGKILL)
        return await launcher.wait()

    cell = await run(Stop(Launcher, kill), SITUATIONS["running"], "streaming")
    assert cell.outcomes.get(Outcome.LOST, 0) > 0
    assert cell.failures[0] == f"exit code {128 + signal.SIGKILL}"
