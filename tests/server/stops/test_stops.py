"""Every accepted request is answered, or its client gets an error, whatever stops the server and whatever it does then.

`make stops` runs every situation before every stop, and docs/operations.md has its table.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from notes import Note
from server.stops.cells import CONFIGS, run
from server.stops.hosts import Launcher
from server.stops.outcomes import Outcome
from server.stops.situations import LEAKED, LEAKED_AND_UNREAD, SITUATIONS, Situation
from server.stops.stops import STOPS, Stop

from perf.report.stops import SITUATIONS as ROWS
from perf.report.stops import STOPS as TITLES


def test_the_table_has_a_row_for_each_situation_and_a_column_for_each_stop() -> None:
    assert set(ROWS) == set(SITUATIONS)
    assert set(TITLES) == {*STOPS, "docker"}


@pytest.mark.parametrize(
    "situation", [LEAKED, pytest.param(LEAKED_AND_UNREAD, marks=pytest.mark.long)], ids=["leaked", "unread"]
)
async def test_sigterm_loses_no_accepted_request_beside_open_streams(situation: Situation, note: Note) -> None:
    await _check("sigterm", situation, "streaming", note)


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stop", STOPS)
async def test_no_accepted_request_is_lost_idle_or_under_load(stop: str, note: Note) -> None:
    for situation in ("idle", "everything"):
        # Two servers at the same time: a start is imports on one core, a stop mostly waiting.
        await asyncio.gather(*(_check(stop, SITUATIONS[situation], config, note) for config in CONFIGS))


async def _check(stop: str, situation: Situation, config: str, note: Note) -> None:
    cell = await run(STOPS[stop], situation, config)
    assert cell.failures == [], cell.log
    assert Outcome.REFUSED not in cell.outcomes
    note(f"{TITLES[stop]}, {config}: {cell.accepted} requests accepted, {cell.outcomes}; {cell.seconds:g} s")


@pytest.mark.campaign
async def test_a_server_that_is_killed_is_seen_to_lose_what_it_had_accepted() -> None:
    async def kill(launcher: Launcher) -> int:
        # The kernel kills the server with it.
        os.kill(launcher.guard, signal.SIGKILL)
        return await launcher.wait()

    cell = await run(Stop(Launcher, kill), SITUATIONS["running"], "streaming")
    assert cell.outcomes.get(Outcome.LOST, 0) > 0
    assert cell.failures[0] == f"exit code {128 + signal.SIGKILL}"
